# SPDX-License-Identifier: Apache-2.0
"""Console output of a run.

On a terminal a bar stays at the bottom:

    step 12/100 ----        gen 96/256 responses 4 s . elapsed 0:03:10, eta 0:24:05 . reward 0.81 . val 0.7

Elsewhere (a file, a pipe, CI) there are plain lines: one per step, and occasional ones in a long stage.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run

KEY_METRICS = {  # metrics in the bar -> their short names
    "reward/overall": "reward",
    "val/reward_score": "val",
    "response_length/mean": "length",
    "actor/entropy": "entropy",
    "actor/ppo_kl": "kl",
    "actor/grad_norm": "grad",
    "train/loss": "loss",
    "val/loss": "val loss",
    "perf/throughput": "tokens/s",
}
QUIET_S = 30.0  # without a terminal: longest silence of a stage that reports progress


class StepClock:
    """Times of a run and of its current step, independent of any console."""

    def __init__(self, total_steps: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.total_steps = total_steps
        self.step = 0
        self.stage_name = ""
        self.units = ""  # "96/256 responses"
        self._started = self._stage_started = self._step_started = now()
        self._seconds_of_steps = 0.0
        self.num_finished_steps = 0  # since the start or resume

    def begin_step(self, step: int) -> None:
        self.step = step
        self._step_started = self._now()
        self.stage("")

    def stage(self, name: str) -> None:
        self.stage_name, self.units = name, ""
        self._stage_started = self._now()

    def end_step(self) -> float:
        """End the step and return its seconds."""
        seconds = self._now() - self._step_started
        self._seconds_of_steps += seconds
        self.num_finished_steps += 1
        self.stage("")
        return seconds

    def elapsed_s(self) -> float:
        return self._now() - self._started

    def stage_s(self) -> float:
        return self._now() - self._stage_started

    def eta_s(self, finished_step: int) -> float | None:
        """Seconds left at the mean pace so far; None before the first step ends or without a total."""
        if not self.num_finished_steps or self.total_steps is None:
            return None
        mean = self._seconds_of_steps / self.num_finished_steps
        # A running step has used up part of its own estimate.
        running = self._now() - self._step_started if self.step > finished_step else 0.0
        return max(0.0, (self.total_steps - finished_step) * mean - min(running, mean))


@LOGGERS.register("console")
class ConsoleLogger(Logger):
    """A progress bar on a terminal, plain lines elsewhere."""

    is_local = True

    def __init__(self, run: Run, console: Console | None = None) -> None:
        super().__init__(run)
        self._console = console or Console()
        self._clock = StepClock(run.total_steps)
        self._finished_step = 0
        self._metrics: dict[str, float] = {}  # last values
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), _Status(self._status))
            self._bar = Progress(*columns, console=self._console, refresh_per_second=2, transient=True)
            self._task = self._bar.add_task(self._step_text(), total=run.total_steps, completed=0)
            self._bar.start()

    def begin_step(self, step: int) -> None:
        if not self._clock.num_finished_steps:
            self._finished_step = step - 1  # a resumed run starts later than 1
        self._clock.begin_step(step)
        self._refresh()

    def stage(self, name: str) -> None:
        self._clock.stage(name)
        self._refresh()

    def progress(self, done: int, total: int, unit: str) -> None:
        self._clock.units = f"{done}/{total} {unit}"
        if self._bar is None and time.monotonic() - self._last_line >= QUIET_S:
            self._print(f"{self._step_text()}: {self._status()}")

    def log(self, metrics: Metrics, step: int) -> None:
        """Print one line per area; the metrics of the running step end it."""
        self._metrics |= metrics
        heading = f"step {step}"
        if step == self._clock.step and step > self._finished_step:
            seconds = self._clock.end_step()
            self._finished_step = step
            heading = f"{self._step_text()}: {seconds:.1f} s, {self._times()}"
        self._print(heading, style="bold")
        self._print("\n".join(f"  {area:<16} {line}" for area, line in _lines_by_area(metrics).items()))
        self._refresh()

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        for number, generation in enumerate(generations, start=1):
            self._print(f"validation at step {step}, response {number}/{len(generations)}", style="bold")
            for name, value in generation._asdict().items():
                self._print(f"  [{name}] {value}")

    def close(self, failed: bool = False) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)
        self._last_line = time.monotonic()

    def _step_text(self) -> str:
        total = f"/{self.run.total_steps}" if self.run.total_steps else ""
        return f"step {max(self._clock.step, self._finished_step)}{total}"

    def _times(self) -> str:
        eta = self._clock.eta_s(self._finished_step)
        elapsed = f"elapsed {_hours(self._clock.elapsed_s())}"
        return elapsed if eta is None else f"{elapsed}, eta {_hours(eta)}"

    def _status(self) -> str:
        stage = f"{self._clock.stage_name} {self._clock.units}".strip()
        if self._clock.stage_name:
            stage += f" {self._clock.stage_s():.0f} s"
        known = [key for key in KEY_METRICS if key in self._metrics]
        values = [f"{KEY_METRICS[key]} {self._metrics[key]:.4g}" for key in known]
        return " · ".join(part for part in [stage, self._times(), *values] if part)

    def _refresh(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=self._step_text(), completed=self._finished_step)


class _Status(ProgressColumn):
    def __init__(self, status: Callable[[], str]) -> None:
        super().__init__()
        self._status = status

    def render(self, task: Task) -> Text:
        return Text(self._status(), overflow="ellipsis", no_wrap=True)


def _lines_by_area(metrics: Metrics) -> dict[str, str]:
    """`{"actor": "pg_loss 0.1 · grad_norm 2", ...}`, in the order of the metrics."""
    areas: dict[str, list[str]] = {}
    for key, value in metrics.items():
        area, _, name = key.rpartition("/") if key.count("/") == 1 else key.partition("/")
        areas.setdefault(area or "other", []).append(f"{name or key} {value:.4g}")
    return {area: " · ".join(entries) for area, entries in areas.items()}


def _hours(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
