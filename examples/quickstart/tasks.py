# SPDX-License-Identifier: Apache-2.0
"""Tasks of reasoning-gym for a real model: questions that it answers now and then."""

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from runs import ROOT, run_command

SCRIPT = ROOT / "examples" / "data_preprocess" / "reasoning_tasks.py"
TASKS = (
    "chain_sum:max_terms=2,max_digits=1",
    "products:max_digits=1",
    "gcd:max_value=20",
    "lcm:max_value=10",
    "letter_counting:min_words=3,max_words=4",
    "simple_equations:max_terms=2,max_value=9",
)
NUM_ROWS, NUM_HELD_OUT = 64, 16  # of each task
PREFIX, SUFFIX = "val/task/", "/accuracy_reward"  # of a task's held-out accuracy


def write_tasks(folder: Path, seed: int) -> None:
    """Write questions of each task to `train.jsonl` and `val.jsonl`."""
    numbers = f"--rows={NUM_ROWS}", f"--val-rows={NUM_HELD_OUT}", f"--seed={seed}"
    run_command([sys.executable, str(SCRIPT), *TASKS, *numbers, f"--output={folder}"])


def accuracies_by_task(log: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the held-out accuracies of each task in a run's log, the first before the first step."""
    found = defaultdict(list)
    for entry in log:
        for name, value in entry.items():
            if name.startswith(PREFIX) and name.endswith(SUFFIX):
                found[name.removeprefix(PREFIX).removesuffix(SUFFIX)].append(value)
    return dict(found)
