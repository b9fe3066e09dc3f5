# SPDX-License-Identifier: Apache-2.0
"""What the worker processes need to know of a run beside the section `worker`."""

from dataclasses import dataclass

from verl.algorithms.rollout_correction import RolloutCorrection
from verl.data.media.cache import MediaCache
from verl.data.media.sizes import MediaOptions
from verl.workers.roles.actor import KLLoss


@dataclass(frozen=True)
class ModelRunOptions:
    """What a worker that holds models needs to know of the options outside `worker`."""

    device: str  # "cuda" or "cpu"
    training_steps: int
    media: MediaOptions
    media_cache: MediaCache  # opens the directory of the node where it is unpickled
    override_chat_template: str | None
    seed: int


@dataclass(frozen=True)
class RunOptions(ModelRunOptions):
    """The same of a worker that samples and learns from it."""

    max_sequence_length: int
    max_response_length: int
    use_reference: bool
    use_critic: bool
    use_prime: bool
    kl_loss: KLLoss | None
    has_full_kl_in_rewards: bool  # the KL over the vocabulary comes with the old log-probs
    has_sum_squares: bool  # so do the sums of squared probabilities
    bypass_correction: RolloutCorrection | None  # `bypass_mode`: what the loss itself corrects
    is_reinforce: bool  # `bypass_mode` with `loss_type=reinforce`
    accuracy_key: str  # the reward function's value that `prime` learns from
