# SPDX-License-Identifier: Apache-2.0
"""Summary of runs on a terminal: metrics, time per phase, best and worst rollouts.

Runs are shown side by side as far as the width allows. To show another metric, add a line to `METRICS`.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import compress, pairwise
from typing import Any

import pyarrow.compute as pc
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from verl.logger.console.logger import readable, shortened
from verl.logger.file import METRICS_FILE
from verl.viewer.rollout_index import conversation
from verl.viewer.rollout_store import TRAIN
from verl.viewer.runs import RunFolder

METRICS = (  # label, metrics of which the first logged one is shown, function of the best value
    ("reward", ("reward/overall", "critic/score/mean"), max),
    ("val reward", ("val/reward_score",), max),
    ("kl", ("actor/ppo_kl",), None),
    ("kl to reference", ("actor/kl_loss", "actor/kl_penalty"), None),
    ("entropy", ("actor/entropy",), None),
    ("grad norm", ("actor/grad_norm",), None),
    ("response length", ("response_length/mean",), None),
    ("cut", ("response_length/clip_ratio",), None),
    ("engine mismatch", ("rollout/log_probs_diff_mean",), None),
    ("gpu memory GB", ("perf/max_memory_allocated_gb",), None),
    ("cpu memory GB", ("perf/cpu_memory_used_gb",), None),
)
STEP_SECONDS = "timing_s/step"
PHASE = "timing_s/"
INSIDE = ("sync_weights",)  # phases that are parts of others
TRAINED_STEP = re.compile(r'^\{"step": (\d+),.*"update_actor"', re.MULTILINE)  # in the log
RECENT = 20  # steps to average times over
LABEL, COLUMN, GAP = 15, 29, 3  # characters: first column, column of a run, gap
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH, BAR_WIDTH = 8, 12  # characters
SHOWN_ROLLOUTS = 3  # best ones, and as many worst ones
NOTHING = "-"
BLANK = Text("")


def printable(text: str, limit: int) -> str:
    """Return a text as one line of at most `limit` visible characters.

    Others, by which untrusted text could control a terminal, become `.`; a longer text ends in `…`.
    """
    words = " ".join(text[: 8 * limit].split())
    shown = "".join(letter if letter.isprintable() else "." for letter in words)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def sparkline(values: Sequence[float]) -> str:
    """Return up to `SPARK_WIDTH` bars, each the mean of equally many consecutive values."""
    if not values:
        return ""
    count = min(SPARK_WIDTH, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


@dataclass(frozen=True)
class RunNumbers:
    """Logged numbers of a run; `metrics` has only finite values, in the order of the steps."""

    name: str
    steps: list[int]
    metrics: dict[str, list[float]]
    total_steps: int | None  # from the config, if it has them
    restarts: int

    @classmethod
    def read(cls, run: RunFolder) -> "RunNumbers":
        """Read the files of a run, which may be incomplete or missing."""
        columns = run.metrics()
        steps = [_is_finite(seconds) for seconds in columns["metrics"].get(STEP_SECONDS, [])]
        metrics = {}
        for name, values in columns["metrics"].items():
            if name.startswith(PHASE) and any(steps):  # a phase that a step lacks took no time in it
                values = [value if _is_finite(value) else 0.0 for value in compress(values, steps)]
            if values := [*filter(_is_finite, values)]:
                metrics[name] = values
        return cls(run.name, columns["step"], metrics, run.total_steps(), _count_restarts(run))

    def recent(self, name: str) -> float | None:
        """Mean of a metric over the last steps."""
        values = self.metrics.get(name, [])[-RECENT:]
        return sum(values) / len(values) if values else None

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a step on average, longest first; `other` is the rest of it."""
        names = [name for name in self.metrics if name.startswith(PHASE) and name != STEP_SECONDS]
        seconds = {name.removeprefix(PHASE): self.recent(name) or 0.0 for name in names}
        named = sum(value for name, value in seconds.items() if name not in INSIDE)
        seconds["other"] = max(0.0, (self.recent(STEP_SECONDS) or 0.0) - named)
        return dict(sorted(seconds.items(), key=lambda item: -item[1])) if names else {}


def summary(runs: Sequence[RunFolder], width: int) -> RenderableType:
    numbers = [RunNumbers.read(run) for run in runs]
    num_columns = max(1, (width - LABEL) // (COLUMN + GAP))
    parts: list[RenderableType] = []
    for start in range(0, len(runs), num_columns):
        parts += [_metrics_table(numbers[start : start + num_columns]), BLANK]
    for run, its_numbers in zip(runs, numbers, strict=True):
        parts += [_phases_table(its_numbers), BLANK, _rollouts_table(run, width), BLANK]
    return Group(*parts)


def show(runs: Sequence[RunFolder], console: Console, refresh_s: float | None = None) -> None:
    """Print the summary, once or every `refresh_s` seconds until Ctrl-C, in place on a terminal."""
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
    """First and last value, the best one if the metric has a best, and a sparkline."""
    values = next((run.metrics[name] for name in names if name in run.metrics), None)
    if values is None or (best is None and len(values) > 1 and not any(values)):  # KL without a second update
        return Text(NOTHING)
    numbers = f"{short(values[0])} > {short(values[-1])}" if len(values) > 1 else short(values[0])
    if best is not None:
        numbers += f" ^{short(best(values))}"
    return Text.assemble(numbers.ljust(COLUMN - SPARK_WIDTH - 1), " ", (sparkline(values), "cyan"))


def short(value: float) -> str:
    """Format a number in few characters: `0.512`, `1.2e-05`, `12345`."""
    if value == 0 or 0.001 <= abs(value) < 1:
        return f"{value:.3f}".removesuffix(".000")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _phases_table(run: RunNumbers) -> RenderableType:
    phases = run.phases()
    if not phases:
        return Text(f"{printable(run.name, COLUMN)}: no times logged")
    total = sum(seconds for name, seconds in phases.items() if name not in INSIDE) or 1.0
    right = partial(Column, justify="right")
    columns = (Column(Text(printable(run.name, COLUMN))), right("s/step"), right("share"), "")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, seconds in phases.items():
        bar = "#" * round(BAR_WIDTH * seconds / total)
        share = "(inside)" if name in INSIDE else f"{seconds / total:.0%}"
        cells = (f"{seconds:.2f}", share, Text(bar, style="green"))
        table.add_row(Text(printable(name, COLUMN)), *cells)
    return table


def _rollouts_table(run: RunFolder, width: int) -> RenderableType:
    columns = ["step", "group", "sample", "score", "response_length", "response_start"]
    table = run.rollouts.refresh()
    rows = table.filter(pc.field("kind") == TRAIN).select(columns).to_pylist()
    last = max((row["step"] for row in rows if row["step"] is not None), default=None)
    scored = [row for row in rows if row["step"] == last and _is_finite(row["score"])]
    if not scored:
        return Text(f"{printable(run.name, COLUMN)}: no rollouts kept")
    scored.sort(key=lambda row: -row["score"])
    rows = [*{(row["score"], row["group"], row["response_start"]): row for row in scored}.values()]
    rows = rows[:SHOWN_ROLLOUTS] + rows[SHOWN_ROLLOUTS:][-SHOWN_ROLLOUTS:]
    read = run.rollouts.rows_of(TRAIN, rows[0]["step"], [(row["group"], row["sample"]) for row in rows])
    whole = {(row["group"], row["sample"]): row for row in read}
    room = max(10, width - 27)
    columns = (Column(width=5), Column("score", justify="right", width=7), Column("tokens", justify="right"))
    text = Column("response, prompt | ground truth", width=room, no_wrap=True)
    table = Table(*columns, text, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, row in enumerate(rows):
        asked = whole.get((row["group"], row["sample"]), {})  # empty if the file was damaged just now
        truth = printable(asked.get("ground_truth") or "", room // 3)
        prompt = conversation(asked.get("messages")) or asked.get("prompt") or ""
        prompt = shortened(readable(shortened(prompt, 8 * room)), room - len(truth) - 3)
        text = Text.assemble(printable(row["response_start"] or "", room), (f"\n{prompt} | {truth}", "dim"))
        label = "best" if number < SHOWN_ROLLOUTS else "worst"
        table.add_row(label, short(row["score"]), str(row["response_length"]), text)
    heading = f"{printable(run.name, COLUMN)}: {len(scored)} scored rollouts of step {last}"
    return Group(Text(heading, style="bold"), table)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _count_restarts(run: RunFolder) -> int:
    """Count how often the log goes back to a step that was already trained."""
    try:
        log = (run.folder / METRICS_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    steps = [int(number) for number in TRAINED_STEP.findall(log)]
    return sum(step <= before for before, step in pairwise(steps))
