# SPDX-License-Identifier: Apache-2.0
"""The algorithm's steps on whole batches, and the formulas under the names that EasyR1's users import.

The formulas themselves stand in `verl/algorithms/`; here they meet `DataProto` and the options.
"""

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import ADV_ESTIMATORS, AdvantageInputs, Advantages, grpo
from verl.algorithms.aggregation import aggregate_loss, count_denominators
from verl.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    kl_divergence,
)
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, ppo
from verl.protocol import DataProto
from verl.trainer.config import AlgorithmConfig
from verl.utils.masking import masked_mean

__all__ = [
    "ADV_ESTIMATORS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdaptiveKLController",
    "AdvantageInputs",
    "Advantages",
    "FixedKLController",
    "KLController",
    "PolicyLoss",
    "PolicyLossInputs",
    "aggregate_loss",
    "apply_kl_penalty",
    "compute_advantages",
    "count_denominators",
    "get_kl_controller",
    "group_ids_of",
    "grpo",
    "kl_divergence",
    "ppo",
]


def get_kl_controller(algorithm: AlgorithmConfig) -> KLController:
    """Build what owns the weight of the KL penalty inside the rewards.

    With `algorithm.disable_kl` there is no penalty at all, with `algorithm.use_kl_loss` it stands in the
    loss: then the controller's `kl_penalty` is None and `apply_kl_penalty` leaves the scores as they are.
    """
    if algorithm.disable_kl or algorithm.use_kl_loss:
        return FixedKLController(0.0, kl_penalty=None)
    if algorithm.kl_type == "adaptive":
        return AdaptiveKLController(
            algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon, algorithm.kl_penalty
        )
    return FixedKLController(algorithm.kl_coef, algorithm.kl_penalty)


def apply_kl_penalty(batch: DataProto, controller: KLController) -> tuple[DataProto, dict[str, float]]:
    """Turn scores into rewards by charging each token for its distance from the reference.

        token_level_rewards = token_level_scores - kl_coef * KL(old policy || reference)    on response tokens

    The metric is the mean over sequences of each one's mean over tokens; the controller adapts to it
    afterwards, so the weight changes from the next step on.

    Args:
        batch: Reads `token_level_scores`, `response_mask`, and with a penalty `old_log_probs`,
            `ref_log_probs`.
        controller: Its weight and estimator; updated here.

    Returns:
        The batch with `token_level_rewards` (B, R) added, and `actor/kl_penalty` and `actor/kl_coef`; no
        metrics without a penalty.
    """
    tensors = batch.batch
    scores = tensors["token_level_scores"]  # (B, R)
    if controller.kl_penalty is None:
        return with_tensors(batch, token_level_rewards=scores), {}

    mask = tensors["response_mask"]
    old, ref = tensors["old_log_probs"], tensors["ref_log_probs"]  # (B, R)
    kl = kl_divergence(old, ref, mask, controller.kl_penalty)  # (B, R)
    current_kl = masked_mean(kl, mask, dim=-1).mean().item()
    metrics = {"actor/kl_penalty": current_kl, "actor/kl_coef": controller.kl_coef}
    rewards = scores - controller.kl_coef * kl
    controller.update(current_kl, n_steps=len(batch))
    return with_tensors(batch, token_level_rewards=rewards), metrics


def compute_advantages(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Return the batch with `advantages` and `returns` (B, R), by the estimator of `algorithm.adv_estimator`.

    Args:
        batch: Reads `token_level_rewards`, `response_mask` and `uid`; the responses to one prompt share a
            `uid`.
        algorithm: The options of the section.

    Raises:
        ValueError: The estimator is unknown, or refuses the batch.
    """
    inputs = AdvantageInputs(
        token_level_rewards=batch.batch["token_level_rewards"],
        response_mask=batch.batch["response_mask"],
        group_ids=group_ids_of(batch.non_tensor_batch["uid"]),
        norm_adv_by_std=algorithm.norm_adv_by_std,
    )
    advantages, returns = ADV_ESTIMATORS[algorithm.adv_estimator](inputs)
    return with_tensors(batch, advantages=advantages, returns=returns)


def group_ids_of(uids: np.ndarray) -> Tensor:
    """Number the prompts in the order of their first response: dense int64 ids (B,) from objects (B,)."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


def with_tensors(batch: DataProto, **tensors: Tensor) -> DataProto:
    """Return a new batch with these tensors added."""
    return batch.merge(DataProto.from_dict(tensors))
