# SPDX-License-Identifier: Apache-2.0
"""Advantages of PRIME: a reward at every token from a process reward model, and the accuracy at the end."""

import torch
from torch import Tensor

from verl.algorithms.advantage_groups import group_sizes, group_sums
from verl.algorithms.advantage_passes import (
    Sequences,
    count_tokens,
    response_tokens,
    row_blocks,
    sums_from_the_end,
    whiten,
    zero_outside,
)
from verl.algorithms.advantage_types import ADV_ESTIMATORS, AdvantageInputs, Advantages, required

RANGE_EPS = 1e-6  # keeps normalised process rewards finite when all are zero


@ADV_ESTIMATORS.register("prime")
@torch.no_grad()
def prime(inputs: AdvantageInputs) -> Advantages:
    """Process rewards and accuracy, each beside the other responses to the prompt, summed up to the end.

        q_t = process reward / (max over the batch of |sum_{s >= t} process reward| + 1e-6)
        x_t = process_coef  * (n / (n - 1) * q_t - sum_j(mean_t(q[j])) / (n - 1))    at every response token
            + accuracy_coef * (n / (n - 1) * a   - sum_j(a_j) / (n - 1))              at the last one
        G_t = sum_{s >= t} x_s
        A_t = (G_t - mean(G)) / sqrt(var(G) + 1e-8)    mean and unbiased variance over all response tokens

    The sums over j go over the n responses to the prompt. The process rewards are as they come when
    `normalize_process_rewards` is off. A response that is alone in its group keeps q_t and a as they are. The
    rewards of the tokens are not read: a KL penalty inside of them has no effect.

    Source: "Process Reinforcement through Implicit Rewards", section 3.2 (https://arxiv.org/abs/2502.01456).

    Args:
        inputs: Reads `response_mask`, `group_ids`, `process_rewards` (B, R), `accuracies` (B,),
            `process_coef`, `accuracy_coef`, `normalize_process_rewards`.

    Returns:
        Whitened advantages; returns from before the whitening.

    Raises:
        ValueError: Shapes differ, an input is missing, or the batch has less than two response tokens.
    """
    kept = response_tokens(inputs)
    rewards = required(inputs, "prime", "process_rewards", like=kept)
    accuracies = required(inputs, "prime", "accuracies", like=inputs.group_ids).double()
    sums, largest = _sums_and_range(rewards, kept)
    sequences = Sequences(kept, sums, count_tokens(kept), inputs.group_ids)
    scale = largest + RANGE_EPS if inputs.normalize_process_rewards else 1.0

    factors, baselines = _leave_one_out(sums / sequences.lengths.clamp(min=1) / scale, sequences)
    at_the_end = inputs.accuracy_coef * (factors * accuracies - _leave_one_out(accuracies, sequences)[1])
    slopes = (inputs.process_coef / scale * factors).float().unsqueeze(-1)  # (B, 1)
    offsets = (-inputs.process_coef * baselines).float().unsqueeze(-1)
    ends = at_the_end.float().unsqueeze(-1)

    returns = torch.empty_like(kept, dtype=torch.float32)
    for rows in row_blocks(kept):
        mixed = zero_outside(torch.addcmul(offsets[rows], slopes[rows], rewards[rows]), kept[rows])
        mixed[:, -1:] += ends[rows]  # at the last response token or behind it: the sums are the same
        zero_outside(sums_from_the_end(mixed), kept[rows], out=returns[rows])
    return Advantages(whiten(returns, kept, "prime"), returns)


def _sums_and_range(rewards: Tensor, kept: Tensor) -> tuple[Tensor, float]:
    """Sum of each row, (B,) float64, and the largest |sum from a token to the end| over the batch."""
    sums = torch.zeros_like(rewards[:, 0], dtype=torch.float64)
    largest = 0.0
    for rows in row_blocks(kept):
        to_the_end = zero_outside(rewards[rows], kept[rows]).flip(-1).cumsum(-1)  # last token first
        low, high = to_the_end.aminmax()
        largest = max(largest, -low.item(), high.item())
        sums[rows] = to_the_end[:, -1].double()
    return sums, largest


def _leave_one_out(values: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Factors n / (n - 1), and each group's sum over n - 1, (B,) each; 1 and 0 for a row that is alone."""
    others = group_sizes(sequences) - 1
    is_compared = others > 0
    others = others.clamp(min=1)
    baselines = group_sums(values, sequences) / others
    return torch.where(is_compared, 1 + 1 / others, 1.0), torch.where(is_compared, baselines, 0.0)
