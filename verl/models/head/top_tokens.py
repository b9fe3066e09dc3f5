# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a few tokens of the vocabulary at each position, without holding the full logits.

With them, or with whole distributions, `Divergence` compares a policy inside its forward pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.distributed.token_sharding import SPRows
from verl.models.head.eager_softmax import blocks, logits_of, overwrite, rows_of
from verl.models.head.logit_chunks import (
    HeadLogits,
    HeadProducts,
    LogitTransform,
    autocast_head,
    chunk_rows,
    chunks,
    head_gradients,
)


class TopTokens(NamedTuple):
    """The most likely tokens of a model at N positions, and the others as one."""

    ids: Tensor  # (N, k) int64
    log_probs: Tensor  # (N, k + 1) float32: of each, and of all other tokens together

    def of_tokens(self, tokens: Tensor) -> "TopTokens":
        return TopTokens(self.ids.index_select(0, tokens), self.log_probs.index_select(0, tokens))


@torch.no_grad()
def top_tokens(head: HeadLogits, k: int, chunk_bytes: int | None = None) -> TopTokens:
    """Find the k most likely tokens at each position."""
    if not 0 < k < len(head.weight):
        raise ValueError(f"k must be from 1 to {len(head.weight) - 1}, one less than the vocabulary, got {k}")
    _check_whole(head)
    head = autocast_head(head)
    ids = torch.empty(len(head.hidden), k, dtype=torch.int64, device=head.hidden.device)
    for chunk, (products,) in chunks([head], chunk_rows([head], chunk_bytes)):
        own, dtype = ids[chunk], torch.promote_types(products.values.dtype, torch.float32)
        for rows in blocks(products.values):
            z = logits_of(products, rows, dtype)
            own[rows] = z.topk(k, dim=1).indices
    return TopTokens(ids, linear_top_log_probs(head, ids, chunk_bytes))


def linear_top_log_probs(policy: HeadLogits, ids: Tensor, chunk_bytes: int | None = None) -> Tensor:
    """Compute log-probabilities of the tokens `ids` (N, k), and of all others together: (N, k + 1) float32.

    Gradients reach the hidden states, weight and bias. The ids of a position must differ.
    """
    if len(ids) != len(policy.hidden):
        raise ValueError(f"one row of ids per hidden state: {tuple(ids.shape)}, {tuple(policy.hidden.shape)}")
    _check_whole(policy)
    policy = autocast_head(policy)
    return _LinearTopLogProbs.apply(*policy[:4], ids, chunk_rows([policy], chunk_bytes))


def _check_whole(head: HeadLogits) -> None:
    if head.part is not None:
        raise NotImplementedError(
            "the most likely tokens of a vocabulary that is divided over ranks are not found: set"
            " `fsdp.tensor_parallel_size` to 1"
        )


class _LinearTopLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        ids: Tensor,
        rows: int,
    ) -> Tensor:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(len(ids), ids.shape[1] + 1, dtype=accurate)
        lse, rest = (hidden.new_empty(len(ids), dtype=accurate) for _ in range(2))
        results = TopStatistics(log_probs, lse, rest)
        for chunk, (products,) in chunks([HeadLogits(hidden, weight, bias, transform)], rows):
            write_top_log_probs(products, ids[chunk], rows_of(results, chunk))
        ctx.save_for_backward(hidden, weight, bias, ids, lse, rest)
        ctx.transform, ctx.rows = transform, rows
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor) -> tuple:
        hidden, weight, bias, ids, lse, rest = ctx.saved_tensors
        given = TopStatistics(grad_log_probs, lse, rest)

        def chunk_grad(chunk: slice, products: Sequence[HeadProducts], grad_bias: Tensor | None) -> Tensor:
            part = rows_of(given, chunk)
            return top_log_prob_gradient(products[0], ids[chunk], part, hidden.dtype, grad_bias)

        heads = [HeadLogits(hidden, weight, bias, ctx.transform)]
        return *head_gradients(ctx, heads, lse.dtype, chunk_grad), None, None, None


class TopStatistics(NamedTuple):
    """Results for M tokens."""

    log_probs: Tensor  # (M, k + 1), or their gradient
    lse: Tensor  # (M,)
    rest: Tensor  # (M,): logarithm of the sum of the exponentials of all logits but those of `ids`


def write_top_log_probs(head: HeadProducts, ids: Tensor, results: TopStatistics) -> None:
    for rows in blocks(head.values):
        log_probs, lse, rest = rows_of(results, rows)
        z = logits_of(head, rows, lse.dtype)
        chosen = z.gather(1, ids[rows])  # (m, k)
        rest.copy_(z.scatter_(1, ids[rows], -math.inf).logsumexp(1))
        lse.copy_(torch.logaddexp(rest, chosen.logsumexp(1)))
        log_probs.copy_(torch.cat([chosen, rest[:, None]], 1) - lse[:, None])


def top_log_prob_gradient(
    head: HeadProducts, ids: Tensor, given: TopStatistics, dtype: torch.dtype, grad_bias: Tensor | None
) -> Tensor:
    """Overwrite products with their gradient.

    With g the gradients of the log-probs, g_r that of the rest, and G their sum:
    d / dz_v = g_v - p_v G for a token of `ids`, p_v (g_r / p_r - G) for any other.
    """

    def block_gradient(rows: slice) -> Tensor:
        grads, lse, rest = rows_of(given, rows)
        z = logits_of(head, rows, lse.dtype)
        slope = head.transform.slope(z)
        total = grads.sum(1, keepdim=True)  # (m, 1)
        own = grads[:, :-1] - (z.gather(1, ids[rows]) - lse[:, None]).exp_().mul_(total)  # (m, k)
        gradient = (z - rest[:, None]).exp_().mul_(grads[:, -1:])
        gradient.sub_(z.sub_(lse[:, None]).exp_().mul_(total))
        return gradient.scatter_(1, ids[rows], own).mul_(slope)

    return overwrite(head.values, block_gradient, dtype, grad_bias)


Distributions = HeadLogits | TopTokens


class TokenTargets(NamedTuple):
    """Distributions of some of a micro batch's M tokens of `loss_mask`, which are numbered row by row."""

    tokens: Tensor  # (K,) int64 on CPU, ascending
    distributions: Distributions  # of these K tokens, on the device
    source: str  # whose they are, for errors


class Places(NamedTuple):
    """The tokens of targets that this rank holds."""

    own: Tensor  # (k,) int64: among this rank's tokens
    targets: Tensor  # (k,) int64: the same, among the targets


@dataclass(frozen=True)
class Divergence:
    """Compares a policy with targets, each token with its own."""

    targets: Sequence[TokenTargets]  # of different tokens
    function: Callable[[HeadLogits, Distributions, str], Tensor]  # of as many tokens in both, to (k,) nats

    def places(self, num_tokens: int, rows: SPRows) -> list[Places]:
        """Find this rank's tokens among the targets, on CPU."""
        held = torch.arange(num_tokens) if rows.owned is None else rows.owned  # (m,)
        found = []
        for tokens, *_ in self.targets:
            number = torch.full((num_tokens,), -1).index_copy(0, tokens, torch.arange(len(tokens)))
            targets = number[held]  # (m,)
            own = (targets >= 0).nonzero()[:, 0]
            found.append(Places(own, targets[own]))
        return found

    def __call__(self, policy: HeadLogits, places: Sequence[Places]) -> Tensor:
        """Compute the divergences of this rank's m tokens, (m,) float32; zero without a target."""
        total = torch.zeros(len(policy.hidden), device=policy.hidden.device)
        for (_, distributions, source), (own, targets) in zip(self.targets, places, strict=True):
            found = self.function(policy.of_tokens(own), distributions.of_tokens(targets), source)
            total = total.index_copy(0, own, found.to(total.dtype))
        return total
