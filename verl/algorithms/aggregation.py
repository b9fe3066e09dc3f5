# SPDX-License-Identifier: Apache-2.0
"""From one loss for each token to the scalar that is minimised, for any split of a mini batch.

Every function returns the *share* of the given rows in the loss of their whole mini batch: it divides by the
tokens or sequences of the mini batch over all ranks, so shares of micro batches and ranks add up to the same
loss however the rows are split. To add an aggregation: one function here, registered under the name
`worker.actor.loss_avg_mode` selects.

Sequences without a response token (nothing but padding, or rejected as a whole) have no loss: they add
nothing, and N_sequences does not count them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from verl.utils.masking import check_same_shape, masked_mean, masked_sum
from verl.utils.registry import Registry


class LossDenominators(NamedTuple):
    """What the loss of a mini batch is divided by: counts over all of its rows, on all ranks."""

    num_tokens: Tensor  # () float32, response tokens
    num_sequences: Tensor  # () float32, sequences with at least one response token
    max_length: float = math.nan  # tokens, `data.max_response_length`; only `seq_sum_norm` reads it


Aggregation = Callable[[Tensor, Tensor, LossDenominators], Tensor]
AGGREGATIONS: Registry[Aggregation] = Registry("worker.actor.loss_avg_mode")


@AGGREGATIONS.register("token")
def token(per_token: Tensor, mask: Tensor, denominators: LossDenominators) -> Tensor:
    """Mean over the response tokens of the mini batch: every token weighs the same.

        sum_{i,t} m[i,t] L[i,t] / N_tokens

    Source: DAPO, section 3.3, token-level policy gradient loss (https://arxiv.org/abs/2503.14476).
    """
    return masked_sum(per_token, mask) / denominators.num_tokens.clamp(min=1)


@AGGREGATIONS.register("seq")
def seq(per_token: Tensor, mask: Tensor, denominators: LossDenominators) -> Tensor:
    """Mean over the sequences of their means over tokens: every response weighs the same.

        sum_i (sum_t m[i,t] L[i,t] / sum_t m[i,t]) / N_sequences

    Source: DeepSeekMath, equation 3 (https://arxiv.org/abs/2402.03300).
    """
    return masked_mean(per_token, mask, dim=-1).sum() / denominators.num_sequences.clamp(min=1)


@AGGREGATIONS.register("seq_sum")
def seq_sum(per_token: Tensor, mask: Tensor, denominators: LossDenominators) -> Tensor:
    """Mean over the sequences of their sums over tokens: the plain policy gradient of whole responses.

        sum_{i,t} m[i,t] L[i,t] / N_sequences

    Every token weighs the same, and the loss grows with the mean length of the mini batch.

    Source: "Understanding R1-Zero-Like Training", section 3.1 (https://arxiv.org/abs/2503.20783).
    """
    return masked_sum(per_token, mask) / denominators.num_sequences.clamp(min=1)


@AGGREGATIONS.register("seq_sum_norm")
def seq_sum_norm(per_token: Tensor, mask: Tensor, denominators: LossDenominators) -> Tensor:
    """`seq_sum` on the scale of one token: divided by the longest response that is allowed (Dr. GRPO).

        sum_{i,t} m[i,t] L[i,t] / (N_sequences max_length)

    The length of a response does not change the weight of its tokens, nor do the lengths of the other
    responses of the mini batch, as they do in `token`.

    Source: "Understanding R1-Zero-Like Training", section 3.2 and listing 1 (https://arxiv.org/abs/2503.20783).

    Raises:
        ValueError: `max_length` is not known, or not positive.
    """
    if not denominators.max_length > 0:
        raise ValueError(
            "`worker.actor.loss_avg_mode` seq_sum_norm divides by `data.max_response_length`, which must be"
            f" positive, got {denominators.max_length}: give `LossDenominators` a `max_length`"
        )
    return seq_sum(per_token, mask, denominators) / denominators.max_length


def aggregate_loss(per_token: Tensor, mask: Tensor, mode: str, denominators: LossDenominators) -> Tensor:
    """Return the share of these rows in the loss of their mini batch.

    Args:
        per_token: Loss of each token, (B, R); what lies outside of the mask does not count, even if it is not
            finite.
        mask: One on response tokens, (B, R).
        mode: A name in `AGGREGATIONS`.
        denominators: Of the whole mini batch, summed over micro batches and ranks.

    Returns:
        A scalar; an empty mini batch gives zero.

    Raises:
        ValueError: Shapes differ, the mode is unknown, or the mode needs a `max_length` that is not given.
    """
    check_same_shape(per_token=per_token, mask=mask)
    return AGGREGATIONS[mode](per_token, mask, denominators)


def count_denominators(mask: Tensor) -> LossDenominators:
    """Count the tokens and the non-empty sequences of a response mask (B, R).

    Sum both over the ranks before use. Counts are float32, exact below 2**24 tokens for each rank.
    """
    lengths = mask.ne(0).sum(-1)  # (B,)
    return LossDenominators(lengths.sum().to(torch.float32), lengths.gt(0).sum().to(torch.float32))
