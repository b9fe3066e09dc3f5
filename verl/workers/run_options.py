# SPDX-License-Identifier: Apache-2.0
"""Options of a run that workers read besides their section of the config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.algorithms.kl import KLLoss
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.distillation import DistillationConfig
from verl.data.media.cache import MediaCache
from verl.data.media.sizes import MediaOptions


@dataclass(frozen=True)
class ModelRunOptions:
    """Options of a run outside of the section `worker`."""

    device: str  # of `BACKENDS`
    training_steps: int
    media: MediaOptions
    media_cache: MediaCache  # opens the directory of the node where it is unpickled
    override_chat_template: str | None
    seed: int
    distillation: DistillationConfig = field(default_factory=DistillationConfig, kw_only=True)


@dataclass(frozen=True)
class RunOptions(ModelRunOptions):
    """Options outside of `worker` for a worker that samples and learns from it."""

    max_sequence_length: int
    max_response_length: int
    use_reference: bool
    use_critic: bool
    use_prime: bool
    kl_loss: KLLoss | None
    has_full_kl_in_rewards: bool  # the KL over the vocabulary is computed with the old log-probs
    has_sum_squares: bool  # so are the sums of squared probabilities
    rollout_correction: RolloutCorrectionConfig
    accuracy_key: str  # key of the reward function that `prime` learns from
    corrects_in_update: bool = False  # nothing computes the log-probs before
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    tools: Sequence[Mapping[str, Any]] = ()  # schemas, for the chat template
    in_lockstep: bool = False  # conversations wait for each other's tools, so that runs repeat

    @property
    def max_prompt_length(self) -> int:
        return self.max_sequence_length - self.max_response_length
