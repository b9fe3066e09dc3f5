# SPDX-License-Identifier: Apache-2.0
"""Partial rollouts: engines and trainer share their devices, and no step waits for the slowest response."""

from verl.trainer.metrics import StageTimer
from verl.trainer.rollouts.collector import Collected
from verl.trainer.rollouts.group_stream import GroupStream


class PartialRollouts(GroupStream):
    """Engines sleep while the model trains.

    A step ends sampling as soon as it has its groups; unfinished responses continue in the next one, with
    its weights.
    """

    def collect(self, step: int, timer: StageTimer) -> Collected:
        version = step - 1
        with self.engines.awake(version, timer):
            self._note_loaded(version)
            self._start(step)
            with self._changed:
                self._wait_for(self._is_ready)
            self._rest()
        with self._changed:
            return self._next_step(step)

    def _is_ready(self) -> bool:
        target = self.collector.quota.target
        self.collector.sampler.report(min(self._num_finished, target), target, "prompts")
        return super()._is_ready()
