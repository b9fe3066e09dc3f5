# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the advantage estimators: reductions over tokens and statistics over groups.

Rows without a response token are excluded from every statistic; their own values are meaningless.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.advantage_types import AdvantageInputs, Advantages
from verl.utils.masking import check_same_shape

# A rollout batch is far larger than the CPU cache: on whole tensors each operation would be a trip through
# memory and an allocation. A block of rows makes one trip for all operations.
BLOCK_TOKENS = 2**18  # 1 MiB of float32
BLOCK_COLUMNS = 64  # for recursions over time; a block of 8192 rows is 2 MiB
VARIANCE_EPS = 1e-8  # keeps whitened values finite when all are equal
STD_EPS = 1e-6  # keeps z-scores finite when all responses to a prompt earn the same


# Float64: in float32 the mean of equal numbers can be off by a rounding error, which the division by an
# equally small standard deviation would turn into an advantage of several percent.
class Sequences(NamedTuple):
    """Per-response sums over tokens."""

    kept: Tensor  # (B, R) bool, the response tokens
    scores: Tensor  # (B,) float64, sum of the rewards
    lengths: Tensor  # (B,) float64, response tokens
    group_ids: Tensor  # (B,) int64


def response_tokens(inputs: AdvantageInputs) -> Tensor:
    """Check the shapes and return the response mask as (B, R) bool."""
    check_same_shape(token_level_rewards=inputs.token_level_rewards, response_mask=inputs.response_mask)
    check_same_shape(rows_of_rewards=inputs.token_level_rewards[:, 0], group_ids=inputs.group_ids)
    return inputs.response_mask != 0


def sum_rewards(inputs: AdvantageInputs) -> Sequences:
    """Sum the rewards of each response and count its tokens."""
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


def broadcast_to_tokens(values: Tensor, kept: Tensor) -> Advantages:
    """Give every response token its sequence's value, (B, R) float32 from (B,)."""
    advantages = by_rows(lambda columns: columns, kept, values.float().unsqueeze(-1))
    return Advantages(advantages, returns=advantages)


def discounted_returns(rewards: Tensor, kept: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each response token to the last one.

        G_t = r_t + gamma * G_next    G after the last response token is 0

    Tokens that the policy did not write are skipped and not discounted. Returns (B, R) float32, zero outside
    of the response tokens, whatever `rewards` holds there.
    """
    if gamma != 1.0:
        return discounted_advantages(
            rewards, torch.zeros_like(rewards[:1]).expand_as(rewards), kept, gamma, 1.0
        )
    return by_rows(lambda reward, keep: reverse_cumsum(zero_outside(reward, keep)), kept, rewards, kept)


def by_rows(function: Callable[..., Tensor], kept: Tensor, *tensors: Tensor) -> Tensor:
    """Apply a function to blocks of rows; (B, R) float32, zero outside of `kept`."""
    results = torch.empty_like(kept, dtype=torch.float32)
    for rows in row_blocks(kept):
        zero_outside(function(*(tensor[rows] for tensor in tensors)), kept[rows], out=results[rows])
    return results


def reverse_cumsum(values: Tensor) -> Tensor:
    """Sum from each token to the last one, (b, R)."""
    return values.flip(-1).cumsum(-1).flip(-1)


def zero_outside(values: Tensor, kept: Tensor, out: Tensor | None = None) -> Tensor:
    """Zero `values` where `kept` is false, into `out` if given."""
    return torch.where(kept, values, values.new_zeros(()), out=out)


def discounted_advantages(rewards: Tensor, values: Tensor, kept: Tensor, gamma: float, lam: float) -> Tensor:
    """Discounted sum of rewards minus values, computed from the last token to the first.

        A_t = r_t - V_t + gamma * (V_next + lam * A_next)    V and A after the last response token are 0

    `next` is the next response token. Returns (B, R) float32, zero outside of the response tokens.
    """
    advantages = torch.empty_like(kept, dtype=torch.float32)
    later = rewards.new_zeros(len(rewards))  # (B,), gamma * (V_next + lam * A_next)
    for columns, (reward, value, keep) in reversed_column_blocks(rewards, values, kept):
        block, carried = reward - value, gamma * value  # (columns, B)
        for t in reversed(range(len(block))):
            total = block[t].add_(later)
            later = torch.where(keep[t], torch.add(carried[t], total, alpha=gamma * lam), later)
        advantages[:, columns] = zero_outside(block, keep).t().contiguous()
    return advantages


def whiten(values: Tensor, kept: Tensor, estimator: str) -> Tensor:
    """Normalize (B, R), zero outside of the response tokens, to mean 0 and variance 1 over them.

    (x - mean) / sqrt(var + 1e-8)    with the unbiased variance
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
    """Whiten per-sequence values (B,), each counted once per response token."""
    lengths = sequences.lengths
    values = torch.where(lengths > 0, values, 0.0)
    mean = (lengths * values).sum() / lengths.sum().clamp(min=1)
    total = (lengths * (values - mean).square()).sum()
    return (values - mean) * _inverse_deviation(total, lengths.sum(), estimator)


def _moments(values: Tensor, kept: Tensor) -> tuple[float, float, float]:
    """Count, mean and sum of squared deviations of the kept values in one block."""
    # Float32 is enough: the sum is pairwise and the deviations are from the block's own mean.
    count = kept.count_nonzero().item()
    mean = values.sum().item() / max(count, 1)
    return count, mean, zero_outside(values - mean, kept).square_().sum().item()


def _inverse_deviation(total: Tensor, count: Tensor, estimator: str) -> Tensor:
    """1 / sqrt(variance + eps), from the sum of squared deviations."""
    if count < 2:
        raise ValueError(
            f"`algorithm.adv_estimator` {estimator} whitens over all response tokens of the batch, which"
            f" needs two or more, and the batch has {int(count)}: sample more or longer responses"
        )
    return (total / (count - 1) + VARIANCE_EPS).rsqrt()


def group_sums(values: Tensor, sequences: Sequences) -> Tensor:
    """Sum over each row's group, (B,) float64; rows of one group hold the same value."""
    values = torch.where(sequences.lengths > 0, values, 0.0).double()
    return torch.bincount(sequences.group_ids, weights=values)[sequences.group_ids]


def group_sizes(sequences: Sequences) -> Tensor:
    """Number of non-empty rows in each row's group, (B,) float64."""
    return group_sums(torch.ones_like(sequences.lengths), sequences)


def group_mean_std(values: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of each row's group, (B,) float64 each; 0 and 1 for a lone row."""
    sizes = group_sizes(sequences)
    means = group_sums(values, sequences) / sizes.clamp(min=1)
    squares = group_sums((values - means).square(), sequences)
    stds = (squares / (sizes - 1).clamp(min=1)).sqrt()
    is_compared = sizes > 1
    return torch.where(is_compared, means, 0.0), torch.where(is_compared, stds, 1.0)


def group_z_scores(values: Tensor, sequences: Sequences, divide_by_std: bool) -> Tensor:
    """Deviation from the group's mean, optionally in units of its standard deviation; (B,) float64."""
    means, stds = group_mean_std(values, sequences)
    distances = values - means
    return distances / (stds + STD_EPS) if divide_by_std else distances


def top_two(values: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Find the two largest values (B,) of each group, (G,) each; equal for a tie, -inf for a missing one."""
    ids = sequences.group_ids
    values = torch.where(sequences.lengths > 0, values, -torch.inf)
    lowest = torch.full_like(torch.bincount(ids), -torch.inf, dtype=values.dtype)  # (G,)
    first = lowest.scatter_reduce(0, ids, values, "amax")
    is_first = values == first[ids]
    rest = lowest.scatter_reduce(0, ids, torch.where(is_first, -torch.inf, values), "amax")
    is_shared = torch.bincount(ids, weights=is_first.double()) > 1
    return first, torch.where(is_shared, first, rest)


def row_blocks(tensor: Tensor) -> list[slice]:
    """Split the rows of a (B, R) tensor into blocks that fit in the CPU cache."""
    rows = max(BLOCK_TOKENS // max(tensor.shape[1], 1), 1)
    return [slice(start, start + rows) for start in range(0, len(tensor), rows)]


def reversed_column_blocks(*tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Yield column blocks of (B, R) tensors, last block first, each transposed to (columns, B)."""
    for end in range(tensors[0].shape[1], 0, -BLOCK_COLUMNS):
        columns = slice(max(end - BLOCK_COLUMNS, 0), end)
        # A transposed column is contiguous. Copying first makes the transposition several times as fast: the
        # columns of a wide tensor share few cache lines.
        yield columns, tuple(tensor[:, columns].contiguous().t().contiguous() for tensor in tensors)
