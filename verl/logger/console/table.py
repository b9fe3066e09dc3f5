# SPDX-License-Identifier: Apache-2.0
"""One aligned line per step.

    step    reward     val  length    cut  entropy    grad  mismatch  seconds
    24/150   0.812   0.780   151.0   0.02    1.204   0.310     4e-07      0.5

On a narrow terminal the columns with the highest `rank` are left out. To add a column: a line in `COLUMNS`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from verl.logger.base import Metrics, Run

GAP = 2  # spaces between columns
ROWS_PER_HEADER = 20
STEP, SECONDS = "step", "seconds"
CORRECTION = "rollout_corr/"
CORRECTED = ("rollout_corr/rollout_is_", "rollout_corr/rollout_rs_")  # logged only if something is corrected
OF_A_CRITIC = ("critic/values/", "critic/vf_", "critic/grad_norm", "critic/lr")  # logged only by a critic
WITHOUT_CRITIC = ("critic/returns/",)  # equal the advantages
GPU_MEMORY = "perf/max_memory_"
LABEL_WIDTH = 19
SEPARATOR = " · "


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    title: str
    keys: tuple[str, ...]  # metrics, of which the first logged one is shown
    decimals: int | None  # None is scientific notation
    rank: int  # in the order of leaving columns out on a narrow terminal, highest first
    width: int = 6
    is_expected: bool = True  # has its place from the first row, in runs of its kind

    @property
    def size(self) -> int:
        return max(self.width, len(self.title))

    def value(self, metrics: Metrics) -> float | None:
        return next((metrics[key] for key in self.keys if key in metrics), None)


REWARD = Column("reward", ("reward/overall", "critic/score/mean"), 3, 0)
VALIDATION = Column("val", ("val/reward_score",), 3, 1, is_expected=False)
LOSS = Column("loss", ("train/loss",), 4, 0)
VALIDATION_LOSS = Column("val loss", ("val/loss",), 4, 1, is_expected=False)
LENGTH = Column("length", ("response_length/mean",), 1, 3)
TURNS = Column("turns", ("agent/turns_mean",), 1, 6, 5, is_expected=False)
TOOL_CALLS = Column("calls", ("agent/tool_calls",), 1, 5, 5, is_expected=False)
CUT = Column("cut", ("response_length/clip_ratio",), 2, 7, 5)
KL = Column("kl", ("actor/kl_loss", "actor/kl_penalty"), 4, 5, is_expected=False)
ENTROPY = Column("entropy", ("actor/entropy",), 3, 9)
GRAD_NORM = Column("grad", ("actor/grad_norm", "train/grad_norm"), 3, 4)
MISMATCH = Column("mismatch", ("rollout/log_probs_diff_mean",), 4, 8, 7)
LEARNING_RATE = Column("lr", ("train/lr",), None, 5, 7)
POLICY_LEARNING_RATE = Column("lr", ("actor/lr",), None, 11, 7)
THROUGHPUT = Column("tokens/s", ("perf/throughput",), 0, 10)
DURATION = Column(SECONDS, ("perf/time_per_step",), 1, 2)

COLUMNS = (
    *(REWARD, VALIDATION, LENGTH, TURNS, TOOL_CALLS, CUT, KL, ENTROPY, GRAD_NORM, MISMATCH),
    *(POLICY_LEARNING_RATE, THROUGHPUT, DURATION),
)
SFT_COLUMNS = (LOSS, VALIDATION_LOSS, GRAD_NORM, LEARNING_RATE, THROUGHPUT, DURATION)
SFT_KEYS = ("train/", "val/loss")  # beginnings of metrics that only fine-tuning logs


def number(value: float, decimals: int | None, width: int) -> str:
    """Return a value in at most `width` characters, 5 or more with one for a sign: `0.125`, `-3e-07`."""
    if not math.isfinite(value):
        return str(value)
    if decimals is None or (value != 0 and abs(value) < 0.5 * 10**-decimals):
        candidates = [f"{value:.1e}", f"{value:.0e}"]
    else:
        candidates = [f"{value:.{places}f}" for places in range(decimals, -1, -1)]
        for divisor, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G")):
            candidates += [f"{value / divisor:.{places}f}{unit}" for places in (1, 0)]
    return next((text for text in candidates if len(text) <= width), f"{value:.0e}")


def announced(run: Run) -> set[Column]:
    """Return the columns that not all runs have, but this one will."""
    algorithm, worker, trainer = (run.config.get(name, {}) for name in ("algorithm", "worker", "trainer"))
    columns = set() if algorithm.get("disable_kl", True) else {KL}
    if trainer.get("val_before_train") or trainer.get("val_freq", 0) > 0:
        columns |= {VALIDATION, VALIDATION_LOSS}
    has_turns = worker.get("rollout", {}).get("multi_turn", {}).get("enable")
    return columns | {TURNS, TOOL_CALLS} if has_turns else columns


class StepTable:
    """The rows of a run, with the header where it is due."""

    def __init__(self, run: Run) -> None:
        self._step_size = max(len(STEP), 2 * len(f"{run.total_steps}") + 1) if run.total_steps else 6
        self._columns: tuple[Column, ...] = ()  # of this kind of run
        self._seen = announced(run)
        self._shown: list[Column] = []  # in the last header
        self._rows = 0  # since then
        self._best: float | None = None  # validation

    def lines(self, step: str, metrics: Metrics, width: int) -> Iterator[Text]:
        """Yield the header, if it is due, and the row of a step."""
        if not self._columns:
            self._columns = SFT_COLUMNS if any(key.startswith(SFT_KEYS) for key in metrics) else COLUMNS
        self._seen |= {one for one in self._columns if one.is_expected or one.value(metrics) is not None}
        shown = self._fitting(width)
        if shown != self._shown or self._rows >= ROWS_PER_HEADER:
            self._shown, self._rows = shown, 0
            titles = [f"{column.title:>{column.size}}" for column in shown]
            yield Text((" " * GAP).join([f"{STEP:<{self._step_size}}", *titles]), style="bold")
        self._rows += 1
        row = Text(f"{step:<{self._step_size}}")
        for column in shown:
            value = column.value(metrics)
            text = "" if value is None else number(value, column.decimals, column.width)
            row.append(" " * GAP).append(f"{text:>{column.size}}", style=self._style(column, value))
        row.rstrip()
        yield row

    def count(self, num_lines: int) -> None:
        """Count other lines between the rows: the header is repeated earlier."""
        self._rows += num_lines

    def _fitting(self, width: int) -> list[Column]:
        shown = [column for column in self._columns if column in self._seen]
        while len(shown) > 1 and self._step_size + sum(GAP + column.size for column in shown) > width:
            shown.remove(max(shown, key=lambda column: column.rank))
        return shown

    def _style(self, column: Column, value: float | None) -> str:
        if value is not None and not math.isfinite(value):
            return "bold red"
        if column is REWARD:
            return "cyan"
        if column is not VALIDATION or value is None:
            return ""
        is_best = self._best is None or value > self._best
        self._best = value if is_best else self._best
        return "bold green" if is_best else "green"


def meaningful(metrics: Metrics) -> dict[str, float]:
    """Leave out the metrics that say nothing in the run that logged them."""
    is_corrected = any(key.startswith(CORRECTED) for key in metrics)
    has_critic = _has_critic(metrics)
    return {
        key: value
        for key, value in metrics.items()
        if (is_corrected or not key.startswith(CORRECTION))
        and (has_critic or not key.startswith(WITHOUT_CRITIC))
        and not (value == 0 and key.startswith(GPU_MEMORY))  # on CPU
    }


def area_lines(metrics: Metrics, width: int) -> Iterator[Text]:
    """Yield `actor   pg_loss 0.1 · grad_norm 2`, in the order of the metrics, broken between entries."""
    for area, entries in _by_area(meaningful(metrics)).items():
        label, line = area, entries[0]
        for entry in entries[1:]:
            if 2 + LABEL_WIDTH + 1 + len(line) + len(SEPARATOR) + len(entry) > width:
                yield Text(f"  {label:<{LABEL_WIDTH}} {line}")
                label, line = "", entry
            else:
                line += SEPARATOR + entry
        yield Text(f"  {label:<{LABEL_WIDTH}} {line}")


def _has_critic(metrics: Metrics) -> bool:
    return any(key.startswith(OF_A_CRITIC) for key in metrics)


def _by_area(metrics: Metrics) -> dict[str, list[str]]:
    areas: dict[str, list[str]] = {}
    has_critic = _has_critic(metrics)
    for key, value in metrics.items():
        area, _, name = key.rpartition("/") if key.count("/") == 1 else key.partition("/")
        if area == "critic" and not has_critic:
            area = "scores"  # EasyR1's names for scores and advantages, which need no critic
        areas.setdefault(area or "other", []).append(f"{name or key} {value:.4g}")
    return areas
