# SPDX-License-Identifier: Apache-2.0
"""The algorithm's steps on whole batches, and the formulas under the names that EasyR1's users import.

The formulas are in `verl/algorithms/`; here they are applied to a `DataProto` with the options of a run.
"""

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import ADV_ESTIMATORS, AdvantageInputs, Advantages, grpo
from verl.algorithms.aggregation import aggregate_loss, count_denominators
from verl.algorithms.controllers import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    get_kl_controller,
)
from verl.algorithms.kl import KL_ESTIMATORS, distillation_advantages, kl_divergence
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, ppo
from verl.algorithms.resampling import resample, resampling_weights
from verl.algorithms.rollout_correction import correction_metrics, importance_weights, rejection_mask
from verl.config.algorithm import AlgorithmConfig, PFPPOConfig, RolloutCorrectionConfig
from verl.config.distillation import DistillationConfig
from verl.protocol import DataProto
from verl.utils.masking import masked_mean

__all__ = [
    "ADV_ESTIMATORS", "KL_ESTIMATORS", "POLICY_LOSSES", "AdaptiveKLController", "AdvantageInputs",
    "Advantages", "FixedKLController", "KLController", "PolicyLoss", "PolicyLossInputs", "aggregate_loss",
    "apply_kl_penalty", "compute_advantages", "count_denominators", "get_kl_controller", "group_ids_of",
    "grpo", "kl_divergence", "ppo",
]  # fmt: skip


def apply_kl_penalty(batch: DataProto, controller: KLController) -> tuple[DataProto, dict[str, float]]:
    """Turn scores into rewards by charging each token for its distance from the reference.

        token_level_rewards = token_level_scores - kl_coef * KL(old policy || reference)    on response tokens

    Reads `token_level_scores`, `loss_mask`, and with a penalty `old_log_probs` and `ref_log_probs`, or
    `full_kl` for the KL over the vocabulary. Updates the controller. The metric `actor/kl_penalty` is the
    mean over sequences of each one's mean over tokens.
    """
    tensors = batch.batch
    scores = tensors["token_level_scores"]  # (B, R)
    if controller.kl_penalty is None:
        return batch.merge({"token_level_rewards": scores}), {}

    mask, old = tensors["loss_mask"], tensors["old_log_probs"]
    kl = kl_divergence(
        old, tensors.get("ref_log_probs"), mask, controller.kl_penalty, tensors.get("full_kl")
    )  # (B, R)
    current_kl = masked_mean(kl, mask, dim=-1).mean().item()
    metrics = {"actor/kl_penalty": current_kl, "actor/kl_coef": controller.kl_coef}
    rewards = scores - controller.kl_coef * kl
    controller.update(current_kl, n_steps=len(batch))  # after its use: the next step has the new weight
    return batch.merge({"token_level_rewards": rewards}), metrics


def correct_rollouts(
    batch: DataProto, options: RolloutCorrectionConfig
) -> tuple[DataProto, dict[str, float]]:
    """Measure the mismatch between the engine that sampled and the trainer, and correct for it.

    As far as the options ask for it, adds `kept_mask` (B, R), the loss mask without rejected tokens, and
    `rollout_is_weights` (B, R).
    """
    tensors = batch.batch
    arguments = (tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["loss_mask"], options)
    added = {}
    if options.rollout_rs is not None:
        added["kept_mask"] = rejection_mask(*arguments)
    if options.rollout_is is not None:
        added["rollout_is_weights"] = importance_weights(*arguments)
    return batch.merge(added), measure_mismatch(batch, options)


def measure_mismatch(batch: DataProto, options: RolloutCorrectionConfig) -> dict[str, float]:
    """Measure the mismatch between the engine that sampled and the trainer, and the effect of `options`."""
    tensors = batch.batch
    mask = tensors["loss_mask"]
    return correction_metrics(tensors["old_log_probs"], tensors["rollout_log_probs"], mask, options)


def compute_advantages(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Add `advantages` and `returns` (B, R) by the estimator of `algorithm.adv_estimator`.

    Tokens that `kept_mask` rejects leave the loss mask here. Inputs that only some estimators read may be
    missing from the batch.
    """
    kept = batch.batch.get("kept_mask", batch.batch["loss_mask"])  # (B, R)
    advantages, returns = ADV_ESTIMATORS[algorithm.adv_estimator](advantage_inputs(batch, algorithm))
    added = {"loss_mask": kept, "advantages": advantages * kept, "returns": returns * kept}
    return batch.merge(added, replace=["loss_mask"])


def add_teacher_advantages(
    batch: DataProto, distillation: DistillationConfig
) -> tuple[DataProto, dict[str, float]]:
    """Reward each token for its likelihood under the teacher, on top of `advantages` (B, R).

    Reads `old_log_probs` and `teacher_log_probs`. The metric `distillation/kl` is the mean over all tokens.
    """
    tensors, loss = batch.batch, distillation.distillation_loss
    old, teacher, mask = tensors["old_log_probs"], tensors["teacher_log_probs"], tensors["loss_mask"]
    advantages = distillation_advantages(
        tensors["advantages"], old, teacher, mask, loss.loss_mode, loss.distillation_loss_coef
    )
    metrics = {"distillation/kl": masked_mean(old - teacher, mask).item()}
    return batch.merge({"advantages": advantages}, replace=["advantages"]), metrics


def no_advantages(batch: DataProto) -> DataProto:
    """Add `advantages` and `returns` (B, R) of zero, as of a run without rewards."""
    kept = batch.batch.get("kept_mask", batch.batch["loss_mask"])  # (B, R)
    zeros = torch.zeros(kept.shape)
    added = {"loss_mask": kept, "advantages": zeros, "returns": zeros.clone()}
    return batch.merge(added, replace=["loss_mask"])


def advantage_inputs(batch: DataProto, algorithm: AlgorithmConfig) -> AdvantageInputs:
    tensors, weights = batch.batch, algorithm.gdpo_reward_weights
    mask = tensors["loss_mask"]  # (B, R)
    kept = tensors.get("kept_mask", mask)  # (B, R)
    return AdvantageInputs(
        token_level_rewards=tensors["token_level_rewards"],
        # A sequence that is rejected as a whole takes no part. One that loses tokens keeps its score, which
        # may be on one of them, and its weight in the others' advantages.
        response_mask=mask * kept.any(-1, keepdim=True),
        group_ids=group_ids_of(batch.non_tensor_batch["uid"]),
        norm_adv_by_std=algorithm.norm_adv_by_std,
        gamma=algorithm.gamma,
        turn_gamma=algorithm.turn_gamma,
        lam=algorithm.lam,
        values=tensors.get("values"),
        turn_ids=turn_ids_of(batch),
        reward_baselines=tensors.get("reward_baselines"),
        reward_components=tensors.get("reward_components"),
        reward_weights=None if weights is None else torch.tensor(weights),
        log_probs=tensors.get("old_log_probs"),
        sum_squared_probs=tensors.get("sum_squared_probs"),
        importance_weights=tensors.get("rollout_is_weights"),
        process_rewards=tensors.get("process_rewards"),
        accuracies=tensors.get("accuracies"),
        process_coef=algorithm.prime_process_coef,
        accuracy_coef=algorithm.prime_accuracy_coef,
        normalize_process_rewards=algorithm.prime_norm,
        softmean_beta=algorithm.sppo_beta,
    )


def turn_ids_of(batch: DataProto) -> Tensor:
    """Number the turn of each sampled token, (B, R) int64 from 0; a response without turns is one."""
    mask = batch.batch["loss_mask"]  # (B, R)
    if "turns" not in batch.non_tensor_batch:
        return torch.zeros_like(mask[:1]).expand_as(mask)
    numbers = torch.zeros_like(mask)
    for row, turns in enumerate(batch.non_tensor_batch["turns"]):
        for number, turn in enumerate(turns):
            numbers[row, turn["start"] : turn["stop"]] = number
    return numbers


def entropy_estimate(batch: DataProto) -> float:
    """Estimate the policy's entropy in nats: the mean of -log p over the sampled tokens.

    Source: as the Skywork-OR1 trainer measures it; unbiased for tokens sampled at the trainer's temperature.
    """
    return -masked_mean(batch.batch["old_log_probs"], batch.batch["loss_mask"]).item()


def resample_by_score(batch: DataProto, options: PFPPOConfig, seed: int, step: int) -> DataProto:
    """Resample the sequences of a step by their scores, with replacement (PF-PPO)."""
    # In the order of collection, so that the draw does not depend on the number of ranks.
    batch = batch[batch.batch["row_ids"].argsort()]
    scores = batch.batch["token_level_scores"].sum(-1)  # (B,)
    weights = resampling_weights(scores, options.reweight_method, options.weight_pow)
    return batch[resample(weights, torch.Generator().manual_seed(mixed_seed(seed, step)))]


def mixed_seed(seed: int, step: int) -> int:
    """A seed for one step of a run, which a resumed run computes again."""
    return seed * 1_000_003 + step


def group_ids_of(uids: np.ndarray) -> Tensor:
    """Number the prompts in the order of their first response: dense int64 ids (B,) from objects (B,)."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)
