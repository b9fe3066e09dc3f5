# SPDX-License-Identifier: Apache-2.0
"""Forward passes needed by a step of reinforcement learning before its update."""

from dataclasses import dataclass
from typing import Self

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
        sampled = algorithm.rollout_correction.bypass_mode or config.trainer.diffusion
        reads_old = (
            config.data.rollout_batch_size != actor.global_batch_size
            or actor.ppo_epochs > 1
            or config.trainer.critic_warmup > 0  # steps without an update
            or actor.selects_tokens
            or bool(actor.observers)  # terms of the loss may read their columns
            or actor.adaptive_entropy.enabled
            or algorithm.reads_old_log_probs
            or config.distillation.rewards_tokens
            or algorithm.rollout_correction.needs_whole_batch
        )
        return cls(sampled, not sampled and reads_old, algorithm.needs_ref_log_probs)
