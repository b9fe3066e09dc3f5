# SPDX-License-Identifier: Apache-2.0
"""Statistics over the responses to one prompt, for all prompts at once.

Rows without a response token take no part: they count in no group, and what they are given means nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.advantage_passes import Sequences

STD_EPS = 1e-6  # keeps z-scores finite when all responses to a prompt earn the same


class TopTwo(NamedTuple):
    """The two largest values of each group; -inf where a group has no such one."""

    first: Tensor  # (G,)
    second: Tensor  # (G,), equal to the first if two rows share it


def group_sums(values: Tensor, sequences: Sequences) -> Tensor:
    """Sum over each row's group, (B,) float64 from (B,): rows of one group hold the same value."""
    values = torch.where(sequences.lengths > 0, values, 0.0).double()
    return torch.bincount(sequences.group_ids, weights=values)[sequences.group_ids]


def group_sizes(sequences: Sequences) -> Tensor:
    """Rows of each row's group that have a response token, (B,) float64."""
    return group_sums(torch.ones_like(sequences.lengths), sequences)


def group_mean_std(values: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of each row's group; 0 and 1 for a row that is alone in it.

    Args:
        values: (B,) float64.
        sequences: Names the groups and the rows that take part.

    Returns:
        Means and standard deviations, (B,) float64 each: rows of one group hold the same values.
    """
    sizes = group_sizes(sequences)
    means = group_sums(values, sequences) / sizes.clamp(min=1)
    squares = group_sums((values - means).square(), sequences)
    stds = (squares / (sizes - 1).clamp(min=1)).sqrt()
    is_compared = sizes > 1
    return torch.where(is_compared, means, 0.0), torch.where(is_compared, stds, 1.0)


def group_z_scores(values: Tensor, sequences: Sequences, divide_by_std: bool) -> Tensor:
    """Distance from the mean of the row's group, in its standard deviations if asked for; (B,) float64."""
    means, stds = group_mean_std(values, sequences)
    distances = values - means
    return distances / (stds + STD_EPS) if divide_by_std else distances


def top_two(values: Tensor, sequences: Sequences) -> TopTwo:
    """Find the two largest values (B,) of each group."""
    ids = sequences.group_ids
    values = torch.where(sequences.lengths > 0, values, -torch.inf)
    lowest = torch.full_like(torch.bincount(ids), -torch.inf, dtype=values.dtype)  # (G,)
    first = lowest.scatter_reduce(0, ids, values, "amax")
    is_first = values == first[ids]
    rest = lowest.scatter_reduce(0, ids, torch.where(is_first, -torch.inf, values), "amax")
    is_shared = torch.bincount(ids, weights=is_first.double()) > 1
    return TopTwo(first, torch.where(is_shared, first, rest))
