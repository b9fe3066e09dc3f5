# SPDX-License-Identifier: Apache-2.0
"""The state of a run, saved to and resumed from checkpoints.

A checkpoint is `global_step_N/` with the workers' folders, the loader's `dataloader.pt` and the controller's
`trainer_state.json`; it appears whole or not at all. To save more, override `_save_own` and `_load_own`.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from verl.algorithms.controllers import EntropyController, KLController
from verl.checkpoint.manifest import ORIGIN, STATE_FILE, write_json, write_manifest
from verl.checkpoint.tracker import CheckpointTracker, checkpoint_step, checkpoint_to_resume
from verl.config.trainer import RunConfig
from verl.logger.console.start_up import phase
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.rollouts.collector import RolloutCollector
from verl.trainer.rollouts.schedule import Schedule
from verl.utils.rank_logger import get_logger

if TYPE_CHECKING:
    from verl.data.loader import PromptLoader

logger = get_logger(__name__)

LOADER_FILE = "dataloader.pt"
GROUPS_FILE = "carried_groups.pt"  # only if groups wait for the next step


class Done(NamedTuple):
    """Progress of a run before it resumed."""

    steps: int = 0
    rows: int = 0  # in the batches of these steps, whatever the size of a batch was


NOTHING = Done()


def done_before(checkpoint: Path | None, rows_per_step: int) -> Done:
    """Return what a checkpoint's run had done; an older one did not record its rows, and counts as now."""
    if checkpoint is None:
        return NOTHING
    state, step = json.loads((checkpoint / STATE_FILE).read_text()), checkpoint_step(checkpoint)
    return Done(step, state.get("rows", step * rows_per_step))


class Pending(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    score: float | None  # of the last validation


class Validated(NamedTuple):
    """The score of a validation; higher is better."""

    step: int
    score: float


@dataclass(eq=False)
class RunState:
    """The progress of a run, and its checkpoints."""

    config: RunConfig
    training_steps: int
    rows_per_step: int
    workers: RayWorkerGroup
    loader: "PromptLoader | None"  # None in a run that only validates
    origin: Mapping[str, Any] | None = None  # what checkpoints record for `check_resume`

    step: int = field(init=False, default=0)  # done, the current one included
    before: Done = field(init=False, default=NOTHING)  # what was done when the run resumed
    is_loaded: bool = field(init=False, default=False)  # `load` has come to its end
    saved: Path | None = field(init=False, default=None)  # the last checkpoint of this object
    save_error: str | None = field(init=False, default=None)  # of the last checkpoint that was begun
    best: Validated | None = field(init=False, default=None)  # of the run, also before it was resumed

    def __post_init__(self) -> None:
        self.checkpoints = CheckpointTracker(self.config.checkpoint_folder, self.config.save_limit)
        self._pending: Pending | None = None
        self._score: float | None = None  # of the last validation, at this step or before

    @property
    def is_saved(self) -> bool:
        """Return whether a checkpoint of the current step is written, or begun."""
        if self._pending is not None:
            return self._pending.step == self.step
        return self.saved is not None and checkpoint_step(self.saved) == self.step

    @property
    def rows(self) -> int:
        return self.before.rows + (self.step - self.before.steps) * self.rows_per_step

    def is_due(self, frequency: int) -> bool:
        """Return whether an action of every `frequency` steps, and of the last step, is due now."""
        if self.step == self.training_steps:
            return True
        return frequency > 0 and self.step % frequency == 0

    def record_score(self, score: float) -> None:
        self._score = score
        if self.best is None or score > self.best.score:
            self.best = Validated(self.step, score)

    def save(self) -> None:
        """Begin a checkpoint of the current step; with `trainer.async_save` training does not wait for it."""
        self._finish()  # one checkpoint is written at a time
        self._pending = Pending(self.step, self._score)
        try:
            folder = self.checkpoints.begin(self.step)
            self._write_own_files(folder)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
            self._abandon(str(error))
            return
        self.workers.save_checkpoint(str(folder), self.config.save_model_only, self.config.async_save)
        if not self.config.async_save:
            self._finish()

    def publish(self) -> None:
        if self._pending is not None and all(self.workers.is_checkpoint_written()):
            self._finish()

    def flush(self) -> None:
        """Wait until everything is written; raise `OSError` if the last checkpoint could not be."""
        self._finish()
        if self.save_error is not None:
            raise OSError(
                f"step {self.step} could not be saved to `trainer.save_checkpoint_path`: {self.save_error}"
            )

    def load(self) -> None:
        """Resume from `trainer.load_checkpoint_path`, or from the last checkpoint of this run's folder."""
        folder = checkpoint_to_resume(self.config)
        self.checkpoints.clear()
        if folder is not None:
            with phase("checkpoint"):
                self._load_from(folder)
        self.is_loaded = True

    def _load_from(self, folder: Path) -> None:
        self.step = checkpoint_step(folder)
        self.workers.load_checkpoint(str(folder))
        if self.loader is not None:
            where = torch.load(folder / LOADER_FILE, weights_only=True)
            self.loader.load_state_dict(where, allow_changes=self.config.allow_changed_inputs)
        state = json.loads((folder / STATE_FILE).read_text())
        self.before = done_before(folder, self.rows_per_step)
        self._score = state.get("validation_score")
        best = state.get("best_validation")  # older checkpoints do not have it
        self.best = None if best is None else Validated(best["step"], best["score"])
        self._load_own(folder, state)
        logger.info("resumed: step=%d path=%s", self.step, folder)

    def _write_own_files(self, folder: Path) -> None:
        assert self.loader is not None, "a run that trains has a loader"
        torch.save(self.loader.state_dict(), folder / LOADER_FILE)
        best = None if self.best is None else self.best._asdict()
        common = {
            "step": self.step,
            "rows": self.rows,
            "validation_score": self._score,
            "best_validation": best,
            ORIGIN: self.origin,
        }
        write_json(folder / STATE_FILE, common | self._save_own(folder))
        write_manifest(folder, {"step": self.step})

    def _finish(self) -> None:
        if self._pending is None:
            return
        error = next(filter(None, self.workers.finish_checkpoint()), None)
        if error is not None:
            self._abandon(error)
            return
        try:
            self.saved = self.checkpoints.publish(self._pending.step, self._pending.score)
        except OSError as os_error:
            self._abandon(str(os_error))
            return
        self._pending, self.save_error = None, None

    def _abandon(self, error: str) -> None:
        # A checkpoint that cannot be written must not end the training: the next step tries again.
        assert self._pending is not None, "called while one is written"
        free = shutil.disk_usage(self.checkpoints.root).free / 2**20
        self.checkpoints.clear()
        logger.warning(
            "a checkpoint could not be written, the next step tries again: step=%d free_mib=%.0f cause=%s",
            self._pending.step, free, error,
        )  # fmt: skip
        self._pending, self.save_error = None, error

    def _save_own(self, folder: Path) -> dict[str, Any]:
        """Write the files of this kind of run; return its entries of `trainer_state.json`."""
        return {}

    def _load_own(self, folder: Path, state: dict[str, Any]) -> None:
        """Read what `_save_own` wrote and returned."""


@dataclass(eq=False)
class PPORunState(RunState):
    """The state of reinforcement learning: adds the controllers' weights and the collector's groups."""

    _: KW_ONLY
    kl_controller: KLController
    entropy_controller: EntropyController
    sampling: Schedule

    @property
    def collector(self) -> RolloutCollector:
        return self.sampling.collector

    def save(self) -> None:
        self.sampling.settle()  # what is being sampled moves the loader, and its error ends the run
        super().save()

    def _save_own(self, folder: Path) -> dict[str, Any]:
        self.sampling.save(folder)
        self.collector.save_carried(folder / GROUPS_FILE)
        return {
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
            "carried_groups": self.collector.num_carried,
            "replayable_groups": self.collector.num_replayable,
        }

    def _load_own(self, folder: Path, state: dict[str, Any]) -> None:
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.entropy_controller.load_state_dict(state["entropy_controller"])
        self.sampling.load(folder)
        num_carried, num_stored = state["carried_groups"], state.get("replayable_groups", 0)
        if self.loader is not None and num_carried + num_stored:
            self.collector.load_carried(folder / GROUPS_FILE, num_carried, self.step)
