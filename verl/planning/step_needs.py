# SPDX-License-Identifier: Apache-2.0
"""Forward passes needed by a step of reinforcement learning before its update."""

from dataclasses import dataclass
from typing import Self

from verl.config.algorithm import EXACT_KL
from verl.config.files.paths import is_extension
from verl.config.ppo import PPOConfig


@dataclass(frozen=True)
class StepNeeds:
    """Sources of the log-probs of a step.

    Without a pass for them, the old log-probs are the engine's if `sampled_log_probs` is set; otherwise they
    are computed by the update itself, the only one of its rollout batch.
    """

    sampled_log_probs: bool  # the old log-probs are the rollout engine's
    old_pass: bool  # a forward pass before the update computes the old log-probs
    ref_pass: bool  # a forward pass of the reference computes its log-probs

    @classmethod
    def of(cls, config: PPOConfig) -> Self:
        """Derive the passes from the algorithm and from what reads old log-probs before the update."""
        actor, algorithm = config.worker.actor, config.algorithm
        correction, has_reference = algorithm.rollout_correction, algorithm.use_reference
        sampled = correction.bypass_mode or config.trainer.diffusion
        reads_old = (
            config.data.rollout_batch_size != actor.global_batch_size
            or actor.ppo_epochs > 1
            or config.trainer.critic_warmup > 0  # steps without an update
            or actor.selects_tokens
            or bool(actor.observers)  # terms of the loss may read their columns
            or actor.adaptive_entropy.enabled
            or (has_reference and not algorithm.use_kl_loss)  # a penalty in the rewards
            or "sum_squared_probs" in algorithm.needs
            or is_extension(algorithm.adv_estimator)  # it may read them
            or config.distillation.rewards_tokens
            or correction.rollout_rs is not None  # criteria and means of a whole batch
            or correction.rollout_is_batch_normalize
        )
        # An exact KL runs both models and reads no log-probs of the reference.
        ref_pass = has_reference and algorithm.kl_penalty not in EXACT_KL
        return cls(sampled, not sampled and reads_old, ref_pass)
