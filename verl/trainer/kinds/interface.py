# SPDX-License-Identifier: Apache-2.0
"""Parts of a run of reinforcement learning that depend on what its policy makes."""

from typing import Protocol

from verl.data.media.cache import MediaCache
from verl.data.media.sizes import MediaOptions
from verl.data.readers import Readers
from verl.logger.tracker import Tracker
from verl.rewards.manager import NoRewardFunction, RewardManager
from verl.single_controller.worker import Worker
from verl.trainer.rollouts.engines import Engines
from verl.trainer.rollouts.rollout_log import RolloutLog
from verl.trainer.rollouts.sampler import Sampler


class RunKind(Protocol):
    """Builds the parts of a trainer that differ between text and pictures."""

    @property
    def worker_class(self) -> type[Worker]:
        """The worker of processes that train and sample."""
        ...

    def readers(self, media: MediaOptions, cache: MediaCache) -> Readers:
        """Load the readers of prompts, and check them."""
        ...

    def rollout_log(self, readers: Readers) -> RolloutLog:
        """Return the rollout log."""
        ...

    def sampler(
        self,
        engines: Engines,
        reward: RewardManager | NoRewardFunction,
        readers: Readers,
        tracker: Tracker,
        rollout_log: RolloutLog,
    ) -> Sampler:
        """Return the sampler, which also has responses scored."""
        ...
