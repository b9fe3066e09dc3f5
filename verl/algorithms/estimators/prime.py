# SPDX-License-Identifier: Apache-2.0
"""PRIME's implicit process reward model: its loss, its token rewards and the estimator that uses them.

The model is trained only on whether whole responses are correct. The sum of its log-ratios to its initial
weights is the logit of being correct, so each log-ratio is a reward for its token.

Source: "Process Reinforcement through Implicit Rewards" (https://arxiv.org/abs/2502.01456).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algorithms.advantage_math import (
    Sequences,
    by_rows,
    count_tokens,
    group_sizes,
    group_sums,
    response_tokens,
    reverse_cumsum,
    row_blocks,
    whiten,
    zero_outside,
)
from verl.algorithms.advantage_types import ADV_ESTIMATORS, AdvantageInputs, Advantages, require_field
from verl.utils.masking import check_same_shape, masked_sum

RANGE_EPS = 1e-6  # keeps normalized process rewards finite when all are zero


class PrimeLoss(NamedTuple):
    """Loss of each sequence, and the logit that it compares with the accuracy."""

    per_sequence: Tensor  # (B,) nats; zero for a sequence without a response token
    scores: Tensor  # (B,) logit of a correct response


def process_rewards(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, beta: float) -> Tensor:
    """Reward of each response token (B, R): its log-prob relative to the model's initial weights.

        q[i,t] = beta (log_probs[i,t] - ref_log_probs[i,t])    on response tokens, else zero

    Gradients flow to both log-probs, which are at temperature 1.

    Source: PRIME, section 3.1, equation 3 (https://arxiv.org/abs/2502.01456).
    """
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, response_mask=response_mask)
    log_ratios = log_probs.float() - ref_log_probs.float()
    return beta * log_ratios.masked_fill(response_mask == 0, 0)


def prime_loss(rewards: Tensor, accuracies: Tensor, response_mask: Tensor) -> PrimeLoss:
    """Cross-entropy between the accuracies (B,) and the model's prediction from its rewards q (B, R).

        s_i = sum_t q[i,t]
        L_i = -a_i log sigmoid(s_i) - (1 - a_i) log(1 - sigmoid(s_i))

    q already includes beta; its gradient at every response token is sigmoid(s_i) - a_i.

    Source: PRIME, section 3.1, equation 5 (https://arxiv.org/abs/2502.01456).
    """
    check_same_shape(rewards=rewards, response_mask=response_mask)
    check_same_shape(rows_of_mask=response_mask[:, 0], accuracies=accuracies)
    scores = masked_sum(rewards, response_mask, dim=-1)  # (B,)
    losses = F.binary_cross_entropy_with_logits(scores, accuracies.float(), reduction="none")
    # A sequence without a response token would have the constant loss log 2.
    return PrimeLoss(losses.masked_fill(~response_mask.any(-1), 0), scores)


def check_accuracies(accuracies: Tensor, key: str) -> None:
    """Raise unless all accuracies (B,), the reward function's value `key`, lie in [0, 1]."""
    wrong = ~((accuracies >= 0) & (accuracies <= 1))
    if wrong.any():
        raise ValueError(
            f"`algorithm.prime_accuracy_key` ({key}) must name a value of the reward function in [0, 1], got"
            f" {accuracies[wrong][:5].tolist()} in {int(wrong.sum())} of {len(accuracies)} responses: name"
            " another value, or have the function return 1 for a correct response and 0 for a wrong one"
        )


@ADV_ESTIMATORS.register("prime")
@torch.no_grad()
def prime(inputs: AdvantageInputs) -> Advantages:
    """Return of process rewards and accuracy, each with a leave-one-out baseline.

        q_t = process reward / (max over the batch of |sum_{s >= t} process reward| + 1e-6)
        x_t = process_coef  * (n / (n - 1) * q_t - sum_j(mean_t(q[j])) / (n - 1))    at every response token
            + accuracy_coef * (n / (n - 1) * a   - sum_j(a_j) / (n - 1))              at the last one
        G_t = sum_{s >= t} x_s                         the returns
        A_t = (G_t - mean(G)) / sqrt(var(G) + 1e-8)    mean and unbiased variance over all response tokens

    The sums over j cover the n responses to the prompt. The process rewards are not scaled when
    `normalize_process_rewards` is off. A lone response keeps q_t and a. The token rewards are not read, so a
    KL penalty in them has no effect.

    Source: "Process Reinforcement through Implicit Rewards", section 3.2 (https://arxiv.org/abs/2502.01456).
    """
    kept = response_tokens(inputs)
    rewards = require_field(inputs, "prime", "process_rewards", like=kept)
    accuracies = require_field(inputs, "prime", "accuracies", like=inputs.group_ids).double()
    sums, largest = _sums_and_range(rewards, kept)
    sequences = Sequences(kept, sums, count_tokens(kept), inputs.group_ids)
    scale = largest + RANGE_EPS if inputs.normalize_process_rewards else 1.0

    factors, baselines = _leave_one_out(sums / sequences.lengths.clamp(min=1) / scale, sequences)
    at_the_end = inputs.accuracy_coef * (factors * accuracies - _leave_one_out(accuracies, sequences)[1])
    slopes = (inputs.process_coef / scale * factors).float().unsqueeze(-1)  # (B, 1)
    offsets = (-inputs.process_coef * baselines).float().unsqueeze(-1)
    ends = at_the_end.float().unsqueeze(-1)

    def sums_to_the_end(rewards: Tensor, offset: Tensor, slope: Tensor, end: Tensor, keep: Tensor) -> Tensor:
        mixed = zero_outside(torch.addcmul(offset, slope, rewards), keep)
        mixed[:, -1:] += end  # at or after the last response token: the sums are the same
        return reverse_cumsum(mixed)

    returns = by_rows(sums_to_the_end, kept, rewards, offsets, slopes, ends, kept)
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
    """Factors n / (n - 1) and each group's sum over n - 1, (B,) each; 1 and 0 for a lone row."""
    others = group_sizes(sequences) - 1
    is_compared = others > 0
    others = others.clamp(min=1)
    baselines = group_sums(values, sequences) / others
    return torch.where(is_compared, 1 + 1 / others, 1.0), torch.where(is_compared, baselines, 0.0)
