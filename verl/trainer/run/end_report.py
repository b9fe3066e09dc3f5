# SPDX-License-Identifier: Apache-2.0
"""Reports the end of a run: its best validation, its checkpoints and curves, and the commands to run next.

finished 150 steps in 0:01:20
best validation   0.512 at step 100
last checkpoint   checkpoints/math/first/global_step_150
curves            checkpoints/math/first/experiment_log.jsonl
look              verl-view checkpoints/math/first
export            verl-merge --local_dir checkpoints/math/first/global_step_100/actor
"""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from verl.checkpoint.manifest import whole_steps
from verl.checkpoint.tracker import best_checkpoint
from verl.config.trainer import RunConfig
from verl.logger.console.bar import hours, stderr_console, stdout_console
from verl.logger.file import METRICS_FILE
from verl.utils.imports import deferred
from verl.viewer.rollout_store import FOLDER as ROLLOUTS

LABEL_WIDTH = 17
SERVICES = ("wandb", "swanlab", "mlflow")
command_path = deferred("verl.utils.typed_command", "command_path")  # training itself parses no command


@dataclass(frozen=True)
class Finished:
    """The steps that a process trained, and the best validation of the run."""

    first_step: int
    last_step: int
    seconds: float
    best: tuple[int, float] | None = None  # step and score; higher is better
    is_loss: bool = False  # the score is the negative of a loss

    def heading(self) -> str:
        duration = hours(self.seconds)
        number = self.last_step - self.first_step + 1
        if number < 1:
            return f"finished in {duration} without training"
        if self.first_step > 1:
            return f"finished steps {self.first_step} to {self.last_step} in {duration}"
        return f"finished {number} step{'s' * (number > 1)} in {duration}"


def print_end_report(trainer: RunConfig, finished: Finished) -> None:
    """Print the report of a run that logs to the console, next to its steps."""
    if "console" not in trainer.logger:
        return
    console = stderr_console() if trainer.console == "json" else stdout_console()
    heading, *lines = end_report(trainer, finished)
    for line in (Text(heading, style="bold"), *map(Text, lines)):
        console.print(line, soft_wrap=True)


def end_report(trainer: RunConfig, finished: Finished) -> list[str]:
    """Return the lines of the report; it names only what is in the run's folder."""
    entries = _entries(trainer, finished)
    return [finished.heading(), *(f"  {label:<{LABEL_WIDTH}} {text}" for label, text in entries)]


def _entries(trainer: RunConfig, finished: Finished) -> Iterator[tuple[str, str]]:
    folder = Path(trainer.checkpoint_folder)
    if finished.best is not None:
        step, score = finished.best
        value = f"loss {-score:.4f}" if finished.is_loss else f"{score:.3f}"
        yield "best validation", f"{value} at step {step}" if step else f"{value} before the first step"
    saved = whole_steps(folder) if folder.is_dir() else []  # the newest first
    best = best_checkpoint(folder)
    if best is not None:
        yield "last checkpoint", _shown(saved[0])
        if best != saved[0]:
            yield "best checkpoint", _shown(best)
    has_log = (folder / METRICS_FILE).is_file()
    if has_log:
        yield "curves", _shown(folder / METRICS_FILE)
    if "tensorboard" in trainer.logger:
        root = os.environ.get("TENSORBOARD_DIR")
        yield "curves", _line("tensorboard", "--logdir", Path(root) if root else folder / "tensorboard")
    for service in SERVICES:
        if service in trainer.logger:
            yield "curves", f"{service}: {trainer.project_name}/{trainer.experiment_name}"
    if has_log or (folder / ROLLOUTS).is_dir():
        yield "look", _line("verl-view", folder)
    if best is not None:
        yield "export", _line("verl-merge", "--local_dir", best / "actor")


def _line(command: str, *words: str | Path) -> str:
    return " ".join(_shown(Path(word)) for word in (command_path(command), *words))


def _shown(path: Path) -> str:
    """Return a path as a shell reads it, relative to the working folder if it is inside."""
    inside = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.quote(str(inside))
