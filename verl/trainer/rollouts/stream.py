# SPDX-License-Identifier: Apache-2.0
"""Sampling as a stream: engines of their own sample on while the model trains."""

import time

from verl.config.async_training import AsyncConfig
from verl.single_controller.ray.failure import WorkerError
from verl.trainer.metrics import StageTimer
from verl.trainer.rollouts.collector import Collected, RolloutCollector
from verl.trainer.rollouts.engines import OwnEngines
from verl.trainer.rollouts.group_stream import GroupStream, is_due
from verl.trainer.rollouts.stream_groups import Lane
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


class Stream(GroupStream):
    """Engines never stop, take new weights between two of their steps, and are replaced if they are lost."""

    engines: OwnEngines

    def __init__(
        self,
        engines: OwnEngines,
        collector: RolloutCollector,
        config: AsyncConfig,
        last_step: int,
        at_once: int,
    ) -> None:
        super().__init__(engines, collector, config, last_step, at_once)
        self.max_engine_restarts, self._num_restarts = config.max_engine_restarts, 0

    def collect(self, step: int, timer: StageTimer) -> Collected:
        self._publish(step - 1, timer)
        self._start(step)
        start = time.monotonic()
        with self._changed:
            self._wait_for(self._is_ready)
            idle = {"async/idle_s_training": time.monotonic() - start, "async/idle_s_sampling": self._idle_s}
            self._idle_s = 0.0
            collected = self._next_step(step)
            if self.is_deterministic:
                self._wait_for(lambda: not any(map(is_due, self.lanes)))
        restarts = {"async/engine_restarts": float(self._num_restarts)}
        return collected._replace(metrics=collected.metrics | idle | restarts)

    def _publish(self, version: int, timer: StageTimer) -> None:
        """Offer the weights of now to the engines, which load them when they can."""
        if self.engines.version is None:
            self.engines.load(version, timer)
            self._note_loaded(version)
        elif version != self.engines.version:
            with timer("sync_weights"):
                weights = self.engines.publish(version)
            with self._changed:
                self._weights = weights
                for lane in self.lanes:
                    lane.plan.publish(version)
                self._changed.notify_all()

    def _note_loaded(self, version: int) -> None:
        with self._changed:
            super()._note_loaded(version)
            self._weights = self.engines.weights

    def _drive(self, lane: Lane, at: int) -> None:
        """Keep the engine at this place of its lane at work until the stream rests; replace a lost one."""
        with self._keeping_error():
            is_lost = True
            while is_lost:
                try:
                    self._keep_at_work(lane, at)
                    is_lost = False
                except WorkerError as error:
                    if not error.may_go_away or self._num_restarts >= self.max_engine_restarts:
                        raise
                    self._replace(lane, at, error)

    def _replace(self, lane: Lane, at: int, error: WorkerError) -> None:
        """Start another engine, which samples what the lost one had not finished."""
        number = lane.engines[at]
        with self._changed:
            groups = lane.sampled_by(at)
            for group in groups:
                group.is_with_engine = False
            weights = self._weights
            lane.plan.load(at)
            self._num_restarts += 1
            restarts = self._num_restarts
        logger.warning(
            "rollout engine %d is started again, with %d unfinished prompts: %s", number, len(groups), error
        )
        self.engines.replace(number, restarts)
        self.engines.groups[number].load_weights(weights)
