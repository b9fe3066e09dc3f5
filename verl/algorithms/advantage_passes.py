# SPDX-License-Identifier: Apache-2.0
"""Passes over all tokens of a batch, in blocks that stay in the processor's cache.

A rollout batch is far larger than a cache, so each step of a formula on whole tensors costs a trip through
memory, and new memory for what it returns. Blocks of rows make one trip for all steps together.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.advantage_types import AdvantageInputs, Advantages
from verl.utils.masking import check_same_shape

BLOCK_TOKENS = 2**18  # 1 MiB of float32
BLOCK_COLUMNS = 64  # of the recursions over time; a block of 8192 rows is 2 MiB
VARIANCE_EPS = 1e-8  # keeps whitened values finite when all are the same


class Sequences(NamedTuple):
    """Sums over the tokens of each response, float64 because the mean of a group is taken off them.

    In float32 the mean of equal numbers can differ from them by a rounding error, which the division by an
    equally small standard deviation would blow up to an advantage of several percent.
    """

    kept: Tensor  # (B, R) bool, the response tokens
    scores: Tensor  # (B,) float64, sum of the rewards
    lengths: Tensor  # (B,) float64, response tokens; a row without any takes no part in any statistic
    group_ids: Tensor  # (B,) int64


def response_tokens(inputs: AdvantageInputs) -> Tensor:
    """Return the response mask as (B, R) bool, after a check of the three inputs that all estimators read.

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape(token_level_rewards=inputs.token_level_rewards, response_mask=inputs.response_mask)
    check_same_shape(rows_of_rewards=inputs.token_level_rewards[:, 0], group_ids=inputs.group_ids)
    return inputs.response_mask != 0


def summed_over_tokens(inputs: AdvantageInputs) -> Sequences:
    """Sum the rewards of each response and count its tokens.

    Raises:
        ValueError: Shapes differ.
    """
    kept = response_tokens(inputs)
    rewards = inputs.token_level_rewards
    scores = torch.zeros_like(rewards[:, 0], dtype=torch.float64)
    for rows in row_blocks(kept):
        scores[rows] = zero_outside(rewards[rows], kept[rows]).sum(-1, dtype=torch.float64)
    return Sequences(kept, scores, count_tokens(kept), inputs.group_ids)


def count_tokens(kept: Tensor) -> Tensor:
    """Count the response tokens of each row, (B,) float64 from (B, R) bool."""
    lengths = torch.zeros_like(kept[:, 0], dtype=torch.float64)
    for rows in row_blocks(kept):
        lengths[rows] = kept[rows].sum(-1, dtype=torch.float32).double()  # exact below 2**24 tokens
    return lengths


def over_tokens(values: Tensor, kept: Tensor) -> Advantages:
    """Give every response token its sequence's value: advantages and returns, (B, R) float32, from (B,)."""
    columns = values.float().unsqueeze(-1)  # (B, 1)
    advantages = torch.empty_like(kept, dtype=torch.float32)  # (B, R)
    for rows in row_blocks(kept):
        zero_outside(columns[rows], kept[rows], out=advantages[rows])
    return Advantages(advantages, returns=advantages)


def discounted_returns(rewards: Tensor, kept: Tensor, gamma: float = 1.0) -> Tensor:
    """What each response token and those after it earn.

        G_t = r_t + gamma * G_next    where next is the next response token, and G after the last one is 0

    Args:
        rewards: (B, R); what lies outside of the response tokens does not count.
        kept: (B, R) bool, the response tokens.
        gamma: Discount for each response token; tokens that the policy did not write are passed over.

    Returns:
        (B, R) float32, zero outside of the response tokens.
    """
    if gamma != 1.0:
        return discounted_advantages(
            rewards, torch.zeros_like(rewards[:1]).expand_as(rewards), kept, gamma, 1.0
        )
    returns = torch.empty_like(kept, dtype=torch.float32)
    for rows in row_blocks(kept):
        sums = sums_from_the_end(zero_outside(rewards[rows], kept[rows]))
        zero_outside(sums, kept[rows], out=returns[rows])
    return returns


def sums_from_the_end(values: Tensor) -> Tensor:
    """Sum from each token to the last one, (b, R)."""
    return values.flip(-1).cumsum(-1).flip(-1)


def zero_outside(values: Tensor, kept: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the values with zeros where `kept` is false, in `out` if it is given."""
    return torch.where(kept, values, values.new_zeros(()), out=out)


def discounted_advantages(rewards: Tensor, values: Tensor, kept: Tensor, gamma: float, lam: float) -> Tensor:
    """Sum what each response token earns beyond its value, discounted, from the last token to the first.

        A_t = r_t - V_t + gamma * (V_next + lam * A_next)    where next is the next response token, none is 0

    Args:
        rewards: (B, R); what lies outside of the response tokens does not count.
        values: (B, R), likewise; zeros make A the discounted returns.
        kept: (B, R) bool, the response tokens.
        gamma: Discount for each response token.
        lam: Further discount of what is expected by no value.

    Returns:
        (B, R) float32, zero outside of the response tokens.
    """
    advantages = torch.empty_like(kept, dtype=torch.float32)
    later = rewards.new_zeros(len(rewards))  # (B,), gamma * (V_next + lam * A_next)
    for columns, (reward, value, keep) in column_blocks_from_the_end(rewards, values, kept):
        block, carried = reward - value, gamma * value  # (columns, B)
        for t in reversed(range(len(block))):
            total = block[t].add_(later)
            later = torch.where(keep[t], torch.add(carried[t], total, alpha=gamma * lam), later)
        advantages[:, columns] = zero_outside(block, keep).t().contiguous()
    return advantages


def whiten(values: Tensor, kept: Tensor, estimator: str) -> Tensor:
    """Shift and scale so that the mean over all response tokens of the batch is 0 and the variance 1.

        (x - mean) / sqrt(var + 1e-8)    with the unbiased variance

    Args:
        values: (B, R) float32, zero outside of the response tokens.
        kept: (B, R) bool, the response tokens.
        estimator: Who asks, for the error.

    Returns:
        (B, R) float32, zero outside of the response tokens.

    Raises:
        ValueError: Less than two response tokens have no variance.
    """
    moments = [_moments(values[rows], kept[rows]) for rows in row_blocks(values)]
    counts, means, squares = torch.tensor(moments, dtype=torch.float64).reshape(-1, 3).unbind(-1)
    mean = (counts * means).sum() / counts.sum().clamp(min=1)
    total = (squares + counts * (means - mean).square()).sum()
    scale = _inverse_deviation(total, counts.sum(), estimator)
    whitened = torch.empty_like(values)
    for rows in row_blocks(values):
        block = torch.sub(values[rows], mean.item(), out=whitened[rows]).mul_(scale.item())
        zero_outside(block, kept[rows], out=block)
    return whitened


def whiten_sequences(values: Tensor, sequences: Sequences, estimator: str) -> Tensor:
    """Do what `whiten` does, for tokens that all hold their sequence's value, (B,) float64.

    Raises:
        ValueError: Less than two response tokens have no variance.
    """
    lengths = sequences.lengths
    values = torch.where(lengths > 0, values, 0.0)
    mean = (lengths * values).sum() / lengths.sum().clamp(min=1)
    total = (lengths * (values - mean).square()).sum()
    return (values - mean) * _inverse_deviation(total, lengths.sum(), estimator)


def _moments(values: Tensor, kept: Tensor) -> tuple[float, float, float]:
    """Number, mean and squared distance from that mean, of the kept values of one block.

    Float32 is enough inside of a block, because it is summed pairwise and around the block's own mean.
    """
    count = kept.count_nonzero().item()
    mean = values.sum().item() / max(count, 1)
    return count, mean, zero_outside(values - mean, kept).square_().sum().item()


def _inverse_deviation(total: Tensor, count: Tensor, estimator: str) -> Tensor:
    """1 / sqrt(variance + eps), from the summed squared distance from the mean."""
    if count < 2:
        raise ValueError(
            f"`algorithm.adv_estimator` {estimator} whitens over all response tokens of the batch, which"
            f" needs two or more, and the batch has {int(count)}: sample more or longer responses"
        )
    return (total / (count - 1) + VARIANCE_EPS).rsqrt()


def row_blocks(tensor: Tensor) -> list[slice]:
    """Cut the rows of a (B, R) tensor into blocks that stay in the cache."""
    rows = max(BLOCK_TOKENS // max(tensor.shape[1], 1), 1)
    return [slice(start, start + rows) for start in range(0, len(tensor), rows)]


def column_blocks_from_the_end(*tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Yield the columns of (B, R) tensors block by block, the last block first, each as (columns, B).

    A recursion over time reads whole columns; transposed, a column is contiguous. The copy before the
    transposition makes it several times as fast: columns of a wide tensor share few places of the cache.
    """
    for end in range(tensors[0].shape[1], 0, -BLOCK_COLUMNS):
        columns = slice(max(end - BLOCK_COLUMNS, 0), end)
        yield columns, tuple(tensor[:, columns].contiguous().t().contiguous() for tensor in tensors)
