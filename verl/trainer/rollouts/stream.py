# SPDX-License-Identifier: Apache-2.0
"""Sampling as a stream: separate engines keep sampling while the model trains."""

import time
from functools import partial
from typing import Any

from verl.single_controller.ray.failure import WorkerError
from verl.trainer.metrics import StageTimer
from verl.trainer.rollouts.collector import Collected
from verl.trainer.rollouts.engines import OwnEngines
from verl.trainer.rollouts.group_stream import GroupStream, is_due
from verl.trainer.rollouts.stream_groups import GroupQueue
from verl.utils.background import in_background


class Stream(GroupStream):
    """Engines never stop, and take new weights between two of their steps.

    What a lost engine had not finished is continued by the others, and by engines that join. A deterministic
    queue has one engine, so that it waits for the next one.
    """

    engines: OwnEngines

    def __init__(self, engines: OwnEngines, *arguments: Any) -> None:
        super().__init__(engines, *arguments)
        self.registry = engines.registry
        self.registry.on_start = self._take_started
        if not self.is_deterministic:
            [queue] = self.queues
            queue.engines.extend(range(len(queue.engines), self.registry.num_slots))

    def collect(self, step: int, timer: StageTimer) -> Collected:
        self.registry.start_missing()
        self._publish(step - 1, timer)
        self._start(step)
        start = time.monotonic()
        with self._changed:
            self._wait_for(self._is_ready)
            idle = {"async/idle_s_training": time.monotonic() - start, "async/idle_s_sampling": self._idle_s}
            self._idle_s = 0.0
            collected = self._next_step(step)
            if self.is_deterministic:
                self._wait_for(lambda: not any(map(is_due, self.queues)))
            engines = {
                "async/engines": float(len(self.registry.living)),
                "async/engine_restarts": float(self.registry.num_restarts),
            }
        return collected._replace(metrics=collected.metrics | idle | engines)

    def _publish(self, version: int, timer: StageTimer) -> None:
        """Publish the current weights; the engines load them when they can."""
        if self.engines.version is None:
            self.engines.load(version, timer)
            self._note_loaded(version)
        elif version != self.engines.version:
            with timer("sync_weights"):
                weights = self.engines.publish(version)
            with self._changed:
                self._weights = weights
                for queue in self.queues:
                    queue.plan.publish(version)
                self._changed.notify_all()

    def _note_loaded(self, version: int) -> None:
        with self._changed:
            super()._note_loaded(version)
            self._weights = self.engines.weights

    def _start(self, step: int) -> None:
        with self._changed:
            self._align()
            super()._start(step)

    def _drive(self, queue: GroupQueue, slot: int) -> None:
        """Keep the engine at this slot of its queue at work until the stream rests, or the engine is lost."""
        with self._keeping_error():
            try:
                self._keep_at_work(queue, slot)
            except WorkerError as error:
                if not error.may_go_away:
                    raise
                with self._changed:
                    self.registry.lose(queue.engines[slot], error)
                    self._align()

    def _take_started(self) -> None:
        """Let engines join that have started; while the stream rests, they wait for its next step."""
        with self._keeping_error(), self._changed:
            if not self._is_resting:
                self._align()

    def _align(self) -> None:
        """Have the queues share their prompts among the engines that are alive now."""
        for queue in self.queues:
            self._remove_lost(queue)
        self.registry.join()  # at the slots of lost ones too
        for queue in self.queues:
            self._add_joined(queue)
            if not queue.plan.loaded:
                self.registry.check(queue.engines)
        self._changed.notify_all()

    def _remove_lost(self, queue: GroupQueue) -> None:
        for slot, number in enumerate(queue.engines):
            if slot in queue.plan.loaded and number not in self.registry.living:
                for group in queue.sampled_by(slot):
                    group.is_with_engine = False
                queue.plan.leave(slot)

    def _add_joined(self, queue: GroupQueue) -> None:
        for slot, number in enumerate(queue.engines):
            if slot not in queue.plan.loaded and number in self.registry.living:
                queue.plan.join(slot)
                if not self._is_resting:
                    self._threads.append(in_background(partial(self._drive, queue, slot)))
