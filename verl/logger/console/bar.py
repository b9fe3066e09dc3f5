# SPDX-License-Identifier: Apache-2.0
"""The live line under the steps: the reward, the running stage, the step, and the time that is left.

`StepClock` keeps the times, independent of any console.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache

from rich.console import Console, ConsoleOptions, RenderResult
from rich.file_proxy import FileProxy
from rich.text import Text

from verl.logger.console.table import LOSS, REWARD, VALIDATION, VALIDATION_LOSS, number


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


LEADING, VALIDATED = (REWARD, LOSS), (VALIDATION, VALIDATION_LOSS)
GAP = "  "
STAGE_WIDTH = 26  # that what follows keeps its place: "gen 128/256 responses 12 s"
BAR_WIDTHS = (20, 8)  # characters, at most and at least


class LiveBar:
    """Draws the state of a run, with the last values of its metrics, in one line that fits the console."""

    def __init__(self, clock: StepClock, metrics: Callable[[], Mapping[str, float]]) -> None:
        self._clock, self._metrics = clock, metrics

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.line(options.max_width, is_unicode=not options.ascii_only)

    def line(self, width: int, *, is_unicode: bool = True) -> Text:
        """Return the parts that fit, in the order of a reader's interest."""
        clock, eta = self._clock, self._clock.eta_s()
        step, elapsed = f"step {clock.step_text()}", f"elapsed {hours(clock.elapsed_s())}"
        parts = [
            self._value(LEADING),
            f"{clock.stage_text():<{STAGE_WIDTH}}",
            step,
            "" if eta is None else f"eta {hours(eta)}",
            self._value(VALIDATED),
            elapsed,
        ]
        shown = [part for part in parts if part]
        while len(shown) > 1 and len(GAP.join(shown)) > width:
            shown.pop()
        if elapsed in shown and width - len(GAP.join(shown)) <= BAR_WIDTHS[1]:
            shown.pop()  # the drawn bar says more
        room = min(BAR_WIDTHS[0], width - len(GAP.join(shown)) - 1)
        if step in shown and room >= BAR_WIDTHS[1] and clock.total_steps:
            done = min(room, room * clock.finished_step // clock.total_steps)
            full, empty = "━─" if is_unicode else "#-"
            shown[shown.index(step)] += f" {full * done}{empty * (room - done)}"
        text = Text(GAP.join(shown).rstrip(), no_wrap=True, overflow="crop")
        text.highlight_words([part for part in parts[:1] if part], "bold cyan")
        return text

    def _value(self, columns: tuple) -> str:
        metrics = self._metrics()
        for column in columns:
            value = column.value(metrics)
            if value is not None:
                return f"{column.title} {number(value, column.decimals, column.width)}"
        return ""


@cache
def stdout_console() -> Console:
    return Console(highlight=False)


@cache
def stderr_console() -> Console:
    """Return the console of what a person reads while another program reads stdout."""
    return Console(highlight=False, stderr=True)


def _use_plain_streams() -> None:
    """Give a forked process, such as one that reads rows, the streams below a live line.

    The thread that draws the line may have held the console's lock, which no one releases in the child.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


os.register_at_fork(after_in_child=_use_plain_streams)
