# SPDX-License-Identifier: Apache-2.0
"""Runs on a terminal: what their metrics say now, where the time of a step goes, the best and worst rollouts.

Runs stand side by side, as many as the width has room for. Names and responses are other people's words: of
them only what a terminal prints as a character is shown (`printable`). To show another metric: a line in
`METRICS`.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from verl.logger.file import CONFIG_FILE, METRICS_FILE
from verl.viewer.runs import RunFolder

METRICS = (  # what a line is called, the first of these that a run has, what "best" is if it has a best
    ("reward", ("reward/overall", "critic/score/mean"), max),
    ("val reward", ("val/reward_score",), max),
    ("kl", ("actor/ppo_kl",), None),
    ("kl to reference", ("actor/kl_loss", "actor/kl_penalty"), None),
    ("entropy", ("actor/entropy",), None),
    ("grad norm", ("actor/grad_norm",), None),
    ("response length", ("response_length/mean",), None),
    ("clip ratio", ("response_length/clip_ratio",), None),
    ("engine mismatch", ("rollout/log_probs_diff_mean",), None),
    ("gpu memory GB", ("perf/max_memory_allocated_gb",), None),
    ("cpu memory GB", ("perf/cpu_memory_used_gb",), None),
)
STEP_SECONDS = "timing_s/step"
PHASE = "timing_s/"
RECENT = 20  # steps that times are the mean of
LABEL, COLUMN, GAP = 15, 29, 3  # characters of the first column, of a run's, and between them
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH, BAR_WIDTH = 8, 12  # characters
SHOWN_ROLLOUTS = 3  # best, and as many worst ones
NOTHING = "-"
BLANK = Text("")


def printable(text: str, limit: int) -> str:
    """A text as one line of visible characters: what could steer a terminal, or turn its text around, is `.`.

    Args:
        text: Of anyone.
        limit: Characters at most; a longer text ends in `…`.
    """
    words = " ".join(text[: 8 * limit].split())
    shown = "".join(letter if letter.isprintable() else "." for letter in words)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """Up to `width` bars, each the mean of as many values that follow one another; "" without values."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [place * len(values) // count for place in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


@dataclass(frozen=True)
class RunNumbers:
    """What a run has logged until now.

    Attributes:
        name: Of the run.
        steps: That were logged, in order.
        metrics: The values of each metric that are finite, in the order of the steps.
        total_steps: That the run will take, if its config says so.
        restarts: How often the run went back to a step that it had logged.
    """

    name: str
    steps: list[int]
    metrics: dict[str, list[float]]
    total_steps: int | None
    restarts: int

    @classmethod
    def read(cls, run: RunFolder) -> "RunNumbers":
        """Read the files of a run, which may be half written or not there yet."""
        columns = run.metrics()
        metrics = {}
        for name, values in columns["metrics"].items():
            known = [
                float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)
            ]
            if known:
                metrics[name] = known
        return cls(run.name, columns["step"], metrics, _total_steps(run), _count_restarts(run))

    def recent(self, name: str) -> float | None:
        """The mean of a metric over the last steps."""
        values = self.metrics.get(name, [])[-RECENT:]
        return sum(values) / len(values) if values else None

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a step, the longest first."""
        names = [name for name in self.metrics if name.startswith(PHASE) and name != STEP_SECONDS]
        seconds = {name.removeprefix(PHASE): self.recent(name) or 0.0 for name in names}
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def summary(runs: Sequence[RunFolder], width: int) -> RenderableType:
    """Everything about these runs, for a terminal of so many columns."""
    numbers = [RunNumbers.read(run) for run in runs]
    beside = max(1, (width - LABEL) // (COLUMN + GAP))
    parts: list[RenderableType] = []
    for start in range(0, len(runs), beside):
        parts += [_metrics_table(numbers[start : start + beside]), BLANK]
    for run, its_numbers in zip(runs, numbers, strict=True):
        parts += [_phases_table(its_numbers), BLANK, _rollouts_table(run, width), BLANK]
    return Group(*parts)


def show(runs: Sequence[RunFolder], console: Console, refresh_s: float | None = None) -> None:
    """Print the summary.

    Args:
        runs: What is shown.
        console: Where; on a terminal it is renewed in its place.
        refresh_s: Seconds until it is printed again, until Ctrl-C; None prints it once.
    """
    if refresh_s is None:
        console.print(summary(runs, console.width))
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(summary(runs, console.width), refresh=True)
            time.sleep(refresh_s)


def _metrics_table(runs: Sequence[RunNumbers]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", width=LABEL)
    for run in runs:
        table.add_column(Text(printable(run.name, COLUMN), style="bold"), width=COLUMN)
    table.add_row("step", *(_progress(run) for run in runs))
    table.add_row("steps/hour", *(_per_hour(run) for run in runs))
    table.add_row("time left", *(_time_left(run) for run in runs))
    for label, names, best in METRICS:
        cells = [_course(run, names, best) for run in runs]
        if any(cell.plain != NOTHING for cell in cells):
            table.add_row(label, *cells)
    table.add_row("restarts", *(str(run.restarts) for run in runs))
    return table


def _progress(run: RunNumbers) -> str:
    if not run.steps:
        return NOTHING
    return str(run.steps[-1]) if run.total_steps is None else f"{run.steps[-1]} of {run.total_steps}"


def _per_hour(run: RunNumbers) -> str:
    seconds = run.recent(STEP_SECONDS)
    return f"{3600 / seconds:.1f}" if seconds else NOTHING


def _time_left(run: RunNumbers) -> str:
    seconds = run.recent(STEP_SECONDS)
    if seconds is None or run.total_steps is None:
        return NOTHING
    return str(timedelta(seconds=round(max(0, run.total_steps - run.steps[-1]) * seconds)))


def _course(run: RunNumbers, names: Sequence[str], best: Callable[..., float] | None) -> Text:
    """First and last value, the best where there is one, and the way between them."""
    values = next((run.metrics[name] for name in names if name in run.metrics), None)
    if values is None:
        return Text(NOTHING)
    numbers = f"{short(values[0])} > {short(values[-1])}" if len(values) > 1 else short(values[0])
    if best is not None:
        numbers += f" ^{short(best(values))}"
    return Text.assemble(numbers.ljust(COLUMN - SPARK_WIDTH - 1), " ", (sparkline(values), "cyan"))


def short(value: float) -> str:
    """A number in few characters, if it is of a size that metrics have: `0.512`, `1.2e-05`, `12345`."""
    if value == 0 or 0.001 <= abs(value) < 1:
        return f"{value:.3f}".removesuffix(".000")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _phases_table(run: RunNumbers) -> RenderableType:
    phases = run.phases()
    if not phases:
        return Text(f"{printable(run.name, COLUMN)}: no times logged")
    total = max(run.recent(STEP_SECONDS) or 0.0, *phases.values()) or 1.0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in (printable(run.name, COLUMN), "s/step", "share"):
        table.add_column(Text(heading), justify="left" if heading not in ("s/step", "share") else "right")
    table.add_column("")
    for name, seconds in phases.items():
        bar = "#" * round(BAR_WIDTH * seconds / total)
        table.add_row(
            Text(printable(name, COLUMN)),
            f"{seconds:.2f}",
            f"{seconds / total:.0%}",
            Text(bar, style="green"),
        )
    return table


def _rollouts_table(run: RunFolder, width: int) -> RenderableType:
    """The responses of the last step with the highest and the lowest scores."""
    rows = (
        run.rollouts.refresh()
        .select(["step", "score", "response_length", "group", "response_start"])
        .to_pylist()
    )
    last = max((row["step"] for row in rows), default=None)
    scored = [row for row in rows if row["step"] == last and _is_finite(row["score"])]
    if not scored:
        return Text(f"{printable(run.name, COLUMN)}: no rollouts kept")
    scored.sort(key=lambda row: -row["score"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    room = max(10, width - 27)
    table.add_column("", width=5)
    table.add_column("score", justify="right", width=7)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("response", width=room, no_wrap=True)
    worst = scored[SHOWN_ROLLOUTS:][-SHOWN_ROLLOUTS:]
    for label, chosen in (("best", scored[:SHOWN_ROLLOUTS]), ("worst", worst)):
        for row in chosen:
            response = Text(printable(row["response_start"] or "", room))
            table.add_row(label, short(row["score"]), str(row["response_length"]), response)
    heading = Text(
        f"{printable(run.name, COLUMN)}: {len(scored)} scored rollouts of step {last}", style="bold"
    )
    return Group(heading, table)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _total_steps(run: RunFolder) -> int | None:
    """The steps that the run's config asks for; None if it counts epochs, or cannot be read now."""
    try:
        config = json.loads((run.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        return config["trainer"]["max_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _count_restarts(run: RunFolder) -> int:
    """How often the log goes back: a step is trained that was trained before, after a failure or by hand."""
    count, before = 0, -1
    try:
        lines = (run.folder / METRICS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return 0
    for line in lines:
        if '"update_actor"' not in line:
            continue
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError):
            continue  # a line that is being written
        count += step <= before
        before = step
    return count
