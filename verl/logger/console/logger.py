# SPDX-License-Identifier: Apache-2.0
"""Console output of a run, in the form that `trainer.console` names.

    compact   an aligned line per step; on a terminal a live line with the reward and the stage below them
    full      every metric that means something in the run, grouped by area; the same live line
    json      one JSON object per step on stdout, as in `experiment_log.jsonl`, and nothing else

In a pipe or a file there are plain lines only, with an occasional one in a long stage.
"""

import time
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run, json_line
from verl.logger.console.bar import LiveBar, stdout_console
from verl.logger.console.clock import StepClock, hours, numbered
from verl.logger.console.samples import sample_panel
from verl.logger.console.start_up import release_live_line
from verl.logger.console.table import StepTable, area_lines

QUIET_S = 30.0  # without a terminal: longest silence of a stage that reports progress
REFRESHES = 2  # of the live line per second


@LOGGERS.register("console")
class ConsoleLogger(Logger):
    """Lines for the steps, and on a terminal a live line below them."""

    is_local = True

    def __init__(self, run: Run, console: Console | None = None) -> None:
        super().__init__(run)
        self._console = console or stdout_console()
        release_live_line()
        self._clock = StepClock(run.total_steps)
        self._table = StepTable(run.total_steps)
        self._metrics: dict[str, float] = {}  # last values
        self._samples: tuple[Sequence[Generation], int] | None = None  # to print after their step's line
        self._last_line = time.monotonic()
        self._live: Live | None = None
        if self._console.is_terminal and run.console != "json":
            bar = LiveBar(self._clock, lambda: self._metrics)
            self._live = Live(bar, console=self._console, refresh_per_second=REFRESHES, transient=True)
            self._live.start()

    def begin_step(self, step: int) -> None:
        self._clock.begin_step(step)

    def stage(self, name: str) -> None:
        self._clock.stage("" if name == "step" else name)  # between two stages

    def progress(self, done: int, total: int, unit: str) -> None:
        self._clock.units = f"{done}/{total} {unit}"
        is_silent = self._live is None and self.run.console != "json"
        if is_silent and time.monotonic() - self._last_line >= QUIET_S:
            self._print([f"step {self._clock.step_text()}: {self._clock.stage_text()}, {self._times()}"])

    def log(self, metrics: Metrics, step: int) -> None:
        """Print the lines of a step; the metrics of the running step end it."""
        self._metrics |= metrics
        # The first validation says nothing about the pace of the steps.
        is_running = step == self._clock.step > self._clock.finished_step
        is_step = is_running and not all(key.startswith("val") for key in metrics)
        seconds = self._clock.end_step() if is_step else None
        if self.run.console == "json":
            self._console.file.write(json_line(metrics, step))
            self._console.file.flush()
        elif self.run.console == "full":
            self._print([self._heading(step, seconds), *area_lines(metrics, self._console.width)])
        else:
            number = numbered(step, self.run.total_steps)
            self._print(self._table.lines(number, metrics, self._console.width))
        self._show_samples()

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        if generations and self.run.console != "json":
            self._samples = (generations, step)

    def close(self, failed: bool = False) -> None:
        self._show_samples()
        if self._live is not None:
            self._live.stop()

    def _show_samples(self) -> None:
        if self._samples is not None:
            width, framed = self._console.width, self._live is not None
            self._print([sample_panel(*self._samples, width, framed=framed)])
            self._table.count(2 + 4 * len(self._samples[0]))
        self._samples = None

    def _heading(self, step: int, seconds: float | None) -> Text:
        heading = f"step {numbered(step, self.run.total_steps)}"
        if seconds is not None:
            heading += f": {seconds:.1f} s, {self._times()}"
        return Text(heading, style="bold")

    def _times(self) -> str:
        eta = self._clock.eta_s()
        elapsed = f"elapsed {hours(self._clock.elapsed_s())}"
        return elapsed if eta is None else f"{elapsed}, eta {hours(eta)}"

    def _print(self, lines: Iterable[RenderableType]) -> None:
        for line in lines:
            self._console.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)
        self._last_line = time.monotonic()
