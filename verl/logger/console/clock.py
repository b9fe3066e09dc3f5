# SPDX-License-Identifier: Apache-2.0
"""Times of a run and of its current step."""

import time
from collections.abc import Callable
from datetime import timedelta


class StepClock:
    """Times of a run and of its current step, independent of any console."""

    def __init__(self, total_steps: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.total_steps = total_steps
        self.step = 0
        self.finished_step = 0
        self.num_finished_steps = 0  # since the start or resume
        self.stage_name = ""
        self.units = ""  # "96/256 responses"
        self._started = self._stage_started = self._step_started = now()
        self._seconds_of_steps = 0.0

    def begin_step(self, step: int) -> None:
        if not self.num_finished_steps:
            self.finished_step = step - 1  # a resumed run starts later than 1
        self.step = step
        self._step_started = self._now()
        self.stage("")

    def stage(self, name: str) -> None:
        self.stage_name, self.units = name, ""
        self._stage_started = self._now()

    def end_step(self) -> float:
        seconds = self._now() - self._step_started
        self._seconds_of_steps += seconds
        self.num_finished_steps += 1
        self.finished_step = self.step
        self.stage("")
        return seconds

    def elapsed_s(self) -> float:
        return self._now() - self._started

    def eta_s(self) -> float | None:
        """Seconds left at the mean pace so far; None before the first step ends or without a total."""
        if not self.num_finished_steps or self.total_steps is None:
            return None
        mean = self._seconds_of_steps / self.num_finished_steps
        # A running step has used up part of its own estimate.
        running = self._now() - self._step_started if self.step > self.finished_step else 0.0
        return max(0.0, (self.total_steps - self.finished_step) * mean - min(running, mean))

    def step_text(self) -> str:
        return numbered(max(self.step, self.finished_step), self.total_steps)

    def stage_text(self) -> str:
        """Return `gen 96/256 responses 4 s`; empty between two steps."""
        if not self.stage_name:
            return self.units
        return f"{self.stage_name} {self.units}".strip() + f" {self._now() - self._stage_started:.0f} s"


def numbered(step: int, total_steps: int | None) -> str:
    return f"{step}/{total_steps}" if total_steps else str(step)


def hours(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
