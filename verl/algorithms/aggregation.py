# SPDX-License-Identifier: Apache-2.0
"""Aggregation of per-token losses to a scalar, independent of how a mini batch is split.

Each function returns the contribution of the given rows to the loss of their mini batch: it divides by the
token or sequence count of the whole mini batch on all ranks, so contributions of micro batches and ranks sum
to the loss. Sequences without a response token contribute nothing, and N_sequences excludes them.

To add one, register a function here under the name that `worker.actor.loss_avg_mode` selects.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from verl.utils.masking import check_same_shape, masked_mean, masked_sum
from verl.utils.registry import Registry


class LossDenominators(NamedTuple):
    """Counts over all rows of a mini batch, on all ranks."""

    num_tokens: Tensor  # () float32, response tokens; exact below 2**24 per rank
    num_sequences: Tensor  # () float32, sequences with at least one response token
    max_length: float = math.nan  # tokens, `data.max_response_length`; only for `seq_sum_norm`


Aggregation = Callable[[Tensor, Tensor, LossDenominators], Tensor]
AGGREGATIONS: Registry[Aggregation] = Registry("worker.actor.loss_avg_mode")


@AGGREGATIONS.register("token")
def token(per_token: Tensor, mask: Tensor, denominators: LossDenominators) -> Tensor:
    """Mean over the response tokens of the mini batch: every token has equal weight.

        sum_{i,t} m[i,t] L[i,t] / N_tokens

    Source: DAPO, section 3.3, token-level policy gradient loss (https://arxiv.org/abs/2503.14476).
    """
    return masked_sum(per_token, mask) / denominators.num_tokens.clamp(min=1)


@AGGREGATIONS.register("seq")
def seq(per_token: Tensor, mask: Tensor, denominators: LossDenominators) -> Tensor:
    """Mean over sequences of their token means: every response has equal weight.

        sum_i (sum_t m[i,t] L[i,t] / sum_t m[i,t]) / N_sequences

    Source: DeepSeekMath, equation 3 (https://arxiv.org/abs/2402.03300).
    """
    return masked_mean(per_token, mask, dim=-1).sum() / denominators.num_sequences.clamp(min=1)


@AGGREGATIONS.register("seq_sum")
def seq_sum(per_token: Tensor, mask: Tensor, denominators: LossDenominators) -> Tensor:
    """Mean over sequences of their token sums; grows with the mean length of the mini batch.

        sum_{i,t} m[i,t] L[i,t] / N_sequences

    Source: "Understanding R1-Zero-Like Training", section 3.1 (https://arxiv.org/abs/2503.20783).
    """
    return masked_sum(per_token, mask) / denominators.num_sequences.clamp(min=1)


@AGGREGATIONS.register("seq_sum_norm")
def seq_sum_norm(per_token: Tensor, mask: Tensor, denominators: LossDenominators) -> Tensor:
    """`seq_sum` divided by the maximum response length: no response's length affects a weight (Dr. GRPO).

        sum_{i,t} m[i,t] L[i,t] / (N_sequences max_length)

    Source: "Understanding R1-Zero-Like Training", section 3.2, listing 1 (https://arxiv.org/abs/2503.20783).
    """
    if not denominators.max_length > 0:
        raise ValueError(
            "`worker.actor.loss_avg_mode` seq_sum_norm divides by `data.max_response_length`, which must be"
            f" positive, got {denominators.max_length}: give `LossDenominators` a `max_length`"
        )
    return seq_sum(per_token, mask, denominators) / denominators.max_length


def aggregate_loss(
    per_token: Tensor, mask: Tensor, mode: str, denominators: LossDenominators, weights: Tensor | None = None
) -> Tensor:
    """Return the contribution of these rows (B, R) to the loss of their mini batch; 0 if that is empty.

    Args:
        weights: Weights of the rows, (B,); a row of weight w counts as w rows, also in `denominators`.
    """
    check_same_shape(per_token=per_token, mask=mask)
    if weights is not None:
        per_token = per_token * weights.unsqueeze(-1)
    return AGGREGATIONS[mode](per_token, mask, denominators)


def count_denominators(mask: Tensor, weights: Tensor | None = None) -> LossDenominators:
    """Count the tokens and non-empty sequences of a mask (B, R); sum both over the ranks before use.

    Args:
        weights: Weights of the rows, (B,), see `aggregate_loss`.
    """
    lengths = mask.ne(0).sum(-1)  # (B,)
    counts = lengths.gt(0)  # (B,)
    if weights is not None:
        lengths, counts = lengths * weights.double(), counts * weights.double()
    return LossDenominators(lengths.sum().to(torch.float32), counts.sum().to(torch.float32))
