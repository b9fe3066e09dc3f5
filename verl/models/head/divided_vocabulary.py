# SPDX-License-Identifier: Apache-2.0
"""Statistics of distributions over a vocabulary that is divided over ranks.

Each rank computes those of its own tokens, as if there were no others, and the ranks exchange a few numbers
for each position. With `lse_r` of rank r's logits, its share of the probability is

    w_r = exp(lse_r - lse),  lse = logsumexp_r lse_r

The gradient of a logit needs the joined statistics only, so the backward pass exchanges nothing here.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.models.head.eager_softmax import KLStatistics, LogProbStatistics
from verl.models.head.logit_chunks import HeadLogits


class VocabularyPart(NamedTuple):
    """Consecutive tokens of the vocabulary that a rank has in embedding and head."""

    start: int
    size: int
    group: dist.ProcessGroup  # of the ranks with the other parts

    def own(self, ids: Tensor) -> Tensor:
        """Return the indices of tokens in this part, -1 for other tokens."""
        own = ids - self.start
        return torch.where((own >= 0) & (own < self.size), own, -1)

    def cut(self, head: HeadLogits) -> HeadLogits:
        """Return this part of the factors of logits, which are of the same part already or of all tokens."""
        if head.part == self:
            return head
        if head.part is not None:
            raise ValueError("heads that are divided otherwise cannot be compared: divide both models alike")
        rows = slice(self.start, self.start + self.size)
        bias = None if head.bias is None else head.bias[rows]
        return head._replace(weight=head.weight[rows], bias=bias, part=self)

    def join_log_probs(self, own: LogProbStatistics, targets: Tensor) -> None:
        """Replace statistics of this rank's tokens by those of all ranks' tokens, in place; collective.

            log_prob = z[target] - lse,   entropy = sum_r w_r (entropy_r + lse - lse_r),
            sum_squares = sum_r w_r^2 sum_squares_r

        Args:
            own: Statistics of M positions.
            targets: (M,) int64: index among this rank's tokens, -1 if another rank has the token.
        """
        logits = torch.where(targets >= 0, own.log_probs + own.lse, 0)
        found, lses, *others = self._of_all_ranks([logits, own.lse, own.entropy, own.sum_squares])
        lse = lses.logsumexp(0)
        shares = (lses - lse).exp()  # (ranks, M)
        own.lse.copy_(lse)
        own.log_probs.copy_(found.sum(0) - lse)
        if own.entropy is not None:
            own.entropy.copy_((shares * (others.pop(0) + lse - lses)).sum(0))
        if own.sum_squares is not None:
            own.sum_squares.copy_((shares.square() * others.pop(0)).sum(0))

    def join_kl(self, own: KLStatistics) -> None:
        """Replace KL divergences over this rank's tokens by those over all tokens, in place; collective.

            KL(p || q) = sum_r w_r (KL_r + log w_r - log u_r)    with u_r the share of rank r under q

        For close models the differences of logarithms round less than those of whole divergences would.
        """
        kl, lses, gaps, ref_lses = self._of_all_ranks(own)
        log_shares, log_ref_shares = (each - each.logsumexp(0) for each in (lses, ref_lses))
        shares = log_shares.exp()
        own.kl.copy_((shares * (kl + log_shares - log_ref_shares)).sum(0))
        own.mean_gap.copy_((shares * gaps).sum(0))
        own.lse.copy_(lses.logsumexp(0))
        assert own.ref_lse is not None, "requested where the vocabulary is divided"
        own.ref_lse.copy_(ref_lses.logsumexp(0))

    def _of_all_ranks(self, columns: Iterable[Tensor | None]) -> list[Tensor]:
        """Gather the columns (M,) that are there from all ranks: (ranks, M) each."""
        own = torch.stack([column for column in columns if column is not None])
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, own, group=self.group)
        return list(torch.stack(gathered, 1))
