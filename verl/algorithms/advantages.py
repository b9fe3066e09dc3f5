# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: from the rewards of a rollout batch to what each token's log-prob is pushed by.

To add one: a function from `AdvantageInputs` to `Advantages`, registered under the name that
`algorithm.adv_estimator` selects; an input it needs and others do not is a new field of `AdvantageInputs`
with a default.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.utils.masking import check_same_shape, masked_sum
from verl.utils.registry import Registry


@dataclass(frozen=True)
class AdvantageInputs:
    """What estimators read. Rows are sequences; padding has `response_mask` 0 and may hold anything.

    Example::

        AdvantageInputs(rewards, response_mask, group_ids=torch.tensor([0, 0, 1, 1]))
    """

    token_level_rewards: Tensor  # (B, R) float32
    response_mask: Tensor  # (B, R), one on response tokens
    group_ids: Tensor  # (B,) int64, dense from 0; the responses to one prompt share one
    norm_adv_by_std: bool = True  # divide by the group's standard deviation


class Advantages(NamedTuple):
    """What estimators return; both are zero outside of the response mask."""

    advantages: Tensor  # (B, R) float32
    returns: Tensor  # (B, R) float32, what a value function would learn


AdvantageEstimator = Callable[[AdvantageInputs], Advantages]
ADV_ESTIMATORS: Registry[AdvantageEstimator] = Registry("algorithm.adv_estimator")

STD_EPS = 1e-6  # keeps z-scores finite when all responses to a prompt earn the same


@ADV_ESTIMATORS.register("grpo")
@torch.no_grad()
def grpo(inputs: AdvantageInputs) -> Advantages:
    """Group-relative advantage: a response's return beside the returns of the other responses to its prompt.

        A_i = (r_i - mean(r_group)) / (std(r_group) + eps)    for every token of response i
        A_i =  r_i - mean(r_group)                            when `norm_adv_by_std` is off

    Only the sum of the rewards over a response matters; the standard deviation is the unbiased one, eps is
    1e-6. Without the division, questions that are nearly always or nearly never answered weigh no more than
    others.

    Source: DeepSeekMath, section 4.1.2 (https://arxiv.org/abs/2402.03300); without the division
    "Understanding R1-Zero-Like Training", section 3.2 (https://arxiv.org/abs/2503.20783).

    Args:
        inputs: Reads `token_level_rewards`, `response_mask`, `group_ids`, `norm_adv_by_std`.

    Returns:
        Advantages, and returns equal to them: GRPO has no value function.

    Raises:
        ValueError: Shapes differ, or a prompt has a single response, whose advantage would always be zero.
    """
    scores = sequence_scores(inputs)  # (B,)
    if torch.bincount(inputs.group_ids).eq(1).any():
        raise ValueError(
            "`algorithm.adv_estimator` grpo compares the responses to one prompt, and a prompt has only one:"
            " set `worker.rollout.n` to 2 or more"
        )
    means, stds = group_mean_std(scores, inputs.group_ids)  # (B,), (B,)
    advantages = scores - means
    if inputs.norm_adv_by_std:
        advantages = advantages / (stds + STD_EPS)
    return over_tokens(advantages, inputs.response_mask)


def sequence_scores(inputs: AdvantageInputs) -> Tensor:
    """Sum of the rewards of each response, (B,) float64; checks the shapes of the inputs.

    Float64, because the mean of equal float32 numbers can differ from them by a rounding error that the
    division by an equally small standard deviation would blow up to an advantage of several percent.

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape(token_level_rewards=inputs.token_level_rewards, response_mask=inputs.response_mask)
    check_same_shape(rows_of_rewards=inputs.token_level_rewards[:, 0], group_ids=inputs.group_ids)
    return masked_sum(inputs.token_level_rewards.double(), inputs.response_mask, dim=-1)


def group_mean_std(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of each row's group.

    Args:
        scores: (B,) float64.
        group_ids: (B,) int64, dense from 0; every group has two rows or more.

    Returns:
        Means and standard deviations, (B,) each: rows of one group hold the same values.
    """
    sizes = torch.bincount(group_ids).to(scores.dtype)  # (G,)
    means = torch.zeros_like(sizes).index_add(0, group_ids, scores) / sizes  # (G,)
    deviations = scores - means[group_ids]  # (B,)
    variances = torch.zeros_like(sizes).index_add(0, group_ids, deviations.square()) / (sizes - 1)  # (G,)
    return means[group_ids], variances.sqrt()[group_ids]


def over_tokens(values: Tensor, response_mask: Tensor) -> Advantages:
    """Give every response token its sequence's value: advantages and returns, (B, R) float32, from (B,)."""
    advantages = (values.unsqueeze(-1) * response_mask).float()  # (B, R)
    return Advantages(advantages, returns=advantages)
