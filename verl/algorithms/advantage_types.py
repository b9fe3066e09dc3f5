# SPDX-License-Identifier: Apache-2.0
"""Inputs, outputs and registry of the advantage estimators; `advantages.py` fills the registry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from verl.utils.masking import check_same_shape
from verl.utils.registry import Registry


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator. Rows are sequences; padding (`response_mask` 0) may hold anything, even NaN.

    Example::

        AdvantageInputs(rewards, response_mask, group_ids=torch.tensor([0, 0, 1, 1]))
    """

    token_level_rewards: Tensor  # (B, R) float32
    response_mask: Tensor  # (B, R) int64 or bool, one on response tokens; tool output inside has zeros
    group_ids: Tensor  # (B,) int64, dense from 0; the responses to one prompt share an id
    norm_adv_by_std: bool = True  # divide by the group's standard deviation
    gamma: float = 1.0  # discount factor for each token
    turn_gamma: float = 1.0  # discount factor for each turn of a conversation
    lam: float = 1.0  # weight of later rewards relative to the critic's values; gae and turn_gae
    values: Tensor | None = None  # (B, R) float32, the critic's; gae and turn_gae
    turn_ids: Tensor | None = None  # (B, R) int64, each token's turn, from 0; turn_grpo and turn_gae
    reward_baselines: Tensor | None = None  # (B,) float32, score of the prompt's greedy response; remax
    reward_components: Tensor | None = None  # (B, K) float32, parts of the score; gdpo
    reward_weights: Tensor | None = None  # (K,) float32, default 1; gdpo
    log_probs: Tensor | None = None  # (B, R) float32, of the sampling policy; token baselines
    sum_squared_probs: Tensor | None = None  # (B, R) float32, over the vocabulary; token baselines
    importance_weights: Tensor | None = None  # (B, R) float32, trainer over engine; token baselines
    process_rewards: Tensor | None = None  # (B, R) float32, of the process reward model; prime
    accuracies: Tensor | None = None  # (B,) float32, 1 for a correct answer; prime
    process_coef: float = 5.0  # weight of the process rewards; prime
    accuracy_coef: float = 5.0  # weight of the accuracies; prime
    normalize_process_rewards: bool = True  # scale their returns to [-1, 1]; prime
    softmean_beta: float = 1.0  # sharpness of the soft mean of the scores, above 0; sppo


class Advantages(NamedTuple):
    """Result of an estimator; both tensors are zero outside of the response mask."""

    advantages: Tensor  # (B, R) float32
    returns: Tensor  # (B, R) float32, target of a value function


AdvantageEstimator = Callable[[AdvantageInputs], Advantages]
ADV_ESTIMATORS: Registry[AdvantageEstimator] = Registry("algorithm.adv_estimator")

REMEDIES = {
    "turn_ids": "number the turn of each response token, zeros for responses of one turn",
    "values": "give the critic a model with `worker.critic.model.model_path`",
    "reward_baselines": "score one greedy response to each prompt",
    "reward_components": "name the parts of the reward in `algorithm.gdpo_reward_keys`",
    "log_probs": "compute the log-probs of the response tokens under the policy that sampled them",
    "sum_squared_probs": "the actor computes it with the old log-probs, which"
    " `algorithm.rollout_correction.bypass_mode` must not skip",
    "process_rewards": "give the process reward model a path with `worker.prime.model.model_path`",
    "accuracies": "let the reward function return the key that `algorithm.prime_accuracy_key` names",
}


def require_field(inputs: AdvantageInputs, estimator: str, field: str, like: Tensor | None = None) -> Tensor:
    """Return an optional field, checked for presence and for the shape of `like`."""
    value = getattr(inputs, field)
    if value is None:
        raise ValueError(f"`algorithm.adv_estimator` {estimator} needs `{field}`: {REMEDIES[field]}")
    check_same_shape(**{field: value, "expected": like})
    return value
