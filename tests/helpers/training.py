# SPDX-License-Identifier: Apache-2.0
"""Run the trainer's command on tiny models, as a user would, and read its log."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.warm_runs import run_warm
from verl.logger.file import read_log
from verl.trainer.main import main

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SAMPLERS = QUICKSTART.parent / "sampler"

SMALL = [
    "data.rollout_batch_size=4",
    "data.val_batch_size=-1",
    "data.max_prompt_length=48",
    "data.max_response_length=6",
    "data.num_workers=0",
    "worker.actor.global_batch_size=2",
    "worker.actor.micro_batch_size_per_device_for_update=4",
    "worker.actor.micro_batch_size_per_device_for_experience=4",
    "worker.actor.optim.lr_scheduler_type=constant",  # runs of different length are compared
    "worker.rollout.n=4",
    "trainer.logger=[file]",
    "trainer.val_freq=2",
]


def quickstart_arguments(folder: Path, model: Path, *overrides: str) -> list[str]:
    """Arguments of a small run on the quickstart's data in `folder`."""
    return [
        f"config={QUICKSTART / 'demo.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        f"data.image_dir={folder / 'images'}",
        f"worker.actor.model.model_path={model}",
        f"worker.reward.reward_function={QUICKSTART / 'reward.py'}:compute_score",
        *SMALL,
        *overrides,
    ]


def mixed(folder: Path) -> list[str]:
    """Options that train on a mixture of the rows of `train.jsonl`: `small` has a third of every step."""
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    sources = {"small": lines[:7], "large": lines[7:]}
    for name, rows in sources.items():
        (folder / f"{name}.jsonl").write_text("".join(rows))
    files = [f"data.sources.{name}.train_files={folder / name}.jsonl" for name in sources]
    return [*files, "data.train_files=''", "data.sources.large.weight=2"]


def start_training(
    *arguments: str,
    env: dict[str, str] | None = None,
    apart: bool = False,
    main: Callable[[Sequence[str]], int] = main,
) -> subprocess.CompletedProcess:
    """Run the command of a `main` function to its end; return its output and exit status.

    It runs in this process, as `warm_runs` says, unless it gets an environment or is `apart`.
    """
    if env is None and not apart:
        return run_warm(main, arguments)
    return subprocess.run(
        [sys.executable, "-m", main.__module__, *arguments],
        cwd=ROOT, env=os.environ | (env or {}), capture_output=True, text=True, timeout=400,
    )  # fmt: skip


def train(output: Path, *arguments: str, **how: Any) -> dict[int, dict[str, float]]:
    """Run the trainer into the folder `output`, see `start_training`; return the metrics of each step."""
    finished = start_training(*arguments, f"trainer.save_checkpoint_path={output}", **how)
    text = finished.stderr[-6000:] + finished.stdout[-2000:]
    assert finished.returncode == 0, text
    assert "states are lost" not in text  # the tools' processes end after their last use, and not before
    return read_metrics(output)


def read_metrics(output: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of a run's file logger, by step."""
    return {entry.pop("step"): entry for entry in read_log(output)}


def learned(metrics: dict[str, float]) -> dict[str, float]:
    """Keep the deterministic metrics: no times, no memory."""
    return {key: value for key, value in metrics.items() if not key.startswith(("timing_", "perf/"))}
