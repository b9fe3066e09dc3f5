# SPDX-License-Identifier: Apache-2.0
"""Overview of runs, one line for each, and the options in which their configs differ.

To add a number to the line: an entry in `overview`, and a column in `static/overview.js`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.viewer.rollout_index import plain
from verl.viewer.runs import ENDED, RunFolder, read_notes, run_state

REWARDS = (("reward/overall", max), ("critic/score/mean", max), ("train/loss", min))
VALIDATIONS = (("val/reward_score", max), ("val/loss", min))
SPEED, SECONDS = "perf/throughput", ("timing_s/step", "perf/time_per_step")
RECENT = 20  # steps to average the speed over
Column = Sequence[float | None]


def overview(run: RunFolder) -> dict[str, Any]:
    """Return a run's progress, state, results, times and notes as JSON values."""
    log = run.metrics()
    steps, columns = log["step"], log["metrics"]
    last, total = (steps[-1] if steps else None), run.total_steps()
    speeds = [value for value in columns.get(SPEED, []) if value is not None][-RECENT:]
    seconds = next((columns[name] for name in SECONDS if name in columns), None)
    started, updated = run.times()
    line = {
        "state": _state(run_state(run.folder), last, total),
        "step": last,
        "total_steps": total,
        "reward": _course(steps, columns, REWARDS),
        "validation": _course(steps, columns, VALIDATIONS),
        "tokens_per_s": sum(speeds) / len(speeds) if speeds else None,
        "seconds": sum(value or 0 for value in seconds) if seconds else None,
        "started": started,
        "updated": updated,
    }
    return plain(line | read_notes(run.folder))


def compare_configs(runs: Sequence[RunFolder], *, with_equal: bool = False) -> list[dict[str, Any]]:
    """Return the options whose values differ: `{"option": "worker.rollout.n", "values": ["8", null]}`.

    A value is its JSON text, or None in a run without the option. Options that all runs have alike are left
    out, unless `with_equal`.
    """
    configs = [run.config() for run in runs]
    options = sorted({option for config in configs for option in config})
    rows = [{"option": option, "values": [_text(config, option) for config in configs]} for option in options]
    return [plain(row) for row in rows if with_equal or len(set(row["values"])) > 1]


def _state(lock: str, last: int | None, total: int | None) -> str:
    """Return the state of the lock; that of an ended run says whether it reached its last step."""
    if lock != ENDED or total is None or last is None:
        return lock
    return "finished" if last >= total else "stopped"


def _course(
    steps: Sequence[int], columns: Mapping[str, Column], names: Sequence[tuple[str, Callable[..., Any]]]
) -> dict[str, Any] | None:
    """Last and best value of the first metric that is logged, and the step of the best one."""
    for name, best_of in names:
        values = [
            (value, step)
            for value, step in zip(columns.get(name, []), steps, strict=False)
            if value is not None and math.isfinite(value)
        ]
        if values:
            best, step = best_of(values, key=lambda pair: pair[0])
            return {"name": name, "last": values[-1][0], "best": best, "best_step": step}
    return None


def _text(config: Mapping[str, Any], option: str) -> str | None:
    return json.dumps(config[option], ensure_ascii=False) if option in config else None
