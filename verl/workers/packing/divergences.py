# SPDX-License-Identifier: Apache-2.0
"""Divergence of each token's distribution from other models', inside a packed forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.distributed.token_sharding import SPRows
from verl.models.head.logit_chunks import HeadLogits
from verl.models.head.top_tokens import TopTokens

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
