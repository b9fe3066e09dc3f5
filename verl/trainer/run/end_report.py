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
from verl.checkpoint.tracker import read_record
from verl.config.trainer import RunConfig
from verl.logger.console.bar import stderr_console, stdout_console
from verl.logger.console.clock import hours
from verl.logger.file import METRICS_FILE
from verl.viewer.rollout_store import FOLDER as ROLLOUTS

LABEL_WIDTH = 17
SERVICES = ("wandb", "swanlab", "mlflow")


@dataclass(frozen=True)
class Finished:
    """The steps that a process trained, and the best validation of the run.

    Args:
        best: Step and score; higher is better.
        is_loss: The score is the negative of a loss.
    """

    first_step: int
    last_step: int
    seconds: float
    best: tuple[int, float] | None = None
    is_loss: bool = False

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
    entries = [*_validation(finished), *_checkpoints(trainer), *_curves(trainer), *_commands(trainer)]
    return [finished.heading(), *(f"  {label:<{LABEL_WIDTH}} {text}" for label, text in entries)]


def _validation(finished: Finished) -> Iterator[tuple[str, str]]:
    if finished.best is not None:
        step, score = finished.best
        value = f"loss {-score:.4f}" if finished.is_loss else f"{score:.3f}"
        yield "best validation", f"{value} at step {step}" if step else f"{value} before the first step"


def _checkpoints(trainer: RunConfig) -> Iterator[tuple[str, str]]:
    folders = _saved(trainer)
    if not folders:
        return
    yield "last checkpoint", _shown(folders[0])
    if (best := _best(trainer, folders)) != folders[0]:
        yield "best checkpoint", _shown(best)


def _best(trainer: RunConfig, folders: list[Path]) -> Path:
    """Return the checkpoint with the best validation if it is kept, else the last one."""
    record = read_record(trainer.checkpoint_folder)
    best_step = None if record is None else record.best_global_step
    best = Path(trainer.checkpoint_folder, f"global_step_{best_step}")
    return best if best in folders else folders[0]


def _curves(trainer: RunConfig) -> Iterator[tuple[str, str]]:
    folder = Path(trainer.checkpoint_folder)
    if (folder / METRICS_FILE).is_file():
        yield "curves", _shown(folder / METRICS_FILE)
    if "tensorboard" in trainer.logger:
        root = os.environ.get("TENSORBOARD_DIR")
        yield "curves", f"tensorboard --logdir {_shown(Path(root) if root else folder / 'tensorboard')}"
    for service in SERVICES:
        if service in trainer.logger:
            yield "curves", f"{service}: {trainer.project_name}/{trainer.experiment_name}"


def _commands(trainer: RunConfig) -> Iterator[tuple[str, str]]:
    folder = Path(trainer.checkpoint_folder)
    if (folder / METRICS_FILE).is_file() or (folder / ROLLOUTS).is_dir():
        yield "look", f"verl-view {_shown(folder)}"
    if folders := _saved(trainer):
        yield "export", f"verl-merge --local_dir {_shown(_best(trainer, folders) / 'actor')}"


def _saved(trainer: RunConfig) -> list[Path]:
    """Return the complete checkpoints of the run's folder, the newest first."""
    folder = Path(trainer.checkpoint_folder)
    return whole_steps(folder) if folder.is_dir() else []


def _shown(path: Path) -> str:
    """Return a path as a shell reads it, relative to the working folder if it is inside."""
    inside = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.quote(str(inside))
