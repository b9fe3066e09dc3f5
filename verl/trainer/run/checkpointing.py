# SPDX-License-Identifier: Apache-2.0
"""Where a run stands, and how it is saved and resumed.

A checkpoint is `global_step_N/` with the workers' folders, the loader's `dataloader.pt` and the controller's
`trainer_state.json`. It appears whole or not at all. One that cannot be written is no reason to lose the
training: the next step tries again. To save more, override `_save_own` and `_load_own`.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from verl.checkpoint.manifest import write_json, write_manifest
from verl.checkpoint.tracker import CheckpointTracker, checkpoint_step, checkpoint_to_resume
from verl.config.trainer import RunConfig
from verl.data.loader import PromptLoader
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

LOADER_FILE = "dataloader.pt"
STATE_FILE = "trainer_state.json"


class Saving(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    score: float | None


class SavedRun:
    """The step, the score, and what else every run needs to be resumed.

    Attributes:
        step: Training steps done; the one under way counts.
        training_steps: Steps of the whole run.
        saved: The last checkpoint that this object wrote.
        unsaved: Why the last attempt to write one failed; None if it did not.
    """

    def __init__(
        self,
        config: RunConfig,
        training_steps: int,
        workers: RayWorkerGroup,
        loader: PromptLoader | None,
    ) -> None:
        """Put the parts together; a run that only validates has no loader."""
        self.config = config
        self.training_steps = training_steps
        self.workers = workers
        self.loader = loader
        self.step = 0
        self.checkpoints = CheckpointTracker(config.checkpoint_folder, config.save_limit)
        self.saved: Path | None = None
        self.unsaved: str | None = None
        self._saving: Saving | None = None
        self._score: tuple[int, float] | None = None  # step and value of the last validation

    def is_due(self, frequency: int) -> bool:
        """Whether something that happens every `frequency` steps, and always after the last, happens now."""
        if self.step == self.training_steps:
            return True
        return frequency > 0 and self.step % frequency == 0

    def record_score(self, score: float) -> None:
        """Remember the validation score of the current step; the best step's checkpoint is kept."""
        self._score = (self.step, score)

    def save(self) -> None:
        """Begin a checkpoint of the current step; with `trainer.async_save` training does not wait for it.

        One is written at a time: this waits for the one before.
        """
        self._finish()
        step, score = self._score or (None, None)
        self._saving = Saving(self.step, score if step == self.step else None)
        try:
            folder = self.checkpoints.begin(self.step)
            self._write_own_files(folder)
        except (OSError, RuntimeError) as error:  # torch tells of a full disk by the latter
            self._give_up(str(error))
            return
        behind = self.config.async_save
        self.workers.save_checkpoint(str(folder), self.config.save_model_only, behind)
        if not behind:
            self._finish()

    def publish(self) -> None:
        """Make the checkpoint that is being written count if it is written by now."""
        if self._saving is not None and all(self.workers.is_checkpoint_written()):
            self._finish()

    def settle(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: The last checkpoint could not be written.
        """
        self._finish()
        if self.unsaved is not None:
            raise OSError(
                f"step {self.step} could not be saved to `trainer.save_checkpoint_path`: {self.unsaved}"
            )

    def _write_own_files(self, folder: Path) -> None:
        assert self.loader is not None, "a run that trains has a loader"
        torch.save(self.loader.state_dict(), folder / LOADER_FILE)
        write_json(folder / STATE_FILE, {"step": self.step} | self._save_own(folder))
        write_manifest(folder, {"step": self.step})

    def _finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and make it count."""
        if self._saving is None:
            return
        problem = next(filter(None, self.workers.finish_checkpoint()), None)
        if problem is not None:
            self._give_up(problem)
            return
        try:
            self.saved = self.checkpoints.publish(*self._saving)
        except OSError as error:
            self._give_up(str(error))
            return
        self._saving, self.unsaved = None, None

    def _give_up(self, problem: str) -> None:
        """Free the room of a checkpoint that cannot be written; the one before stays what it is."""
        assert self._saving is not None, "called while one is written"
        free = shutil.disk_usage(self.checkpoints.root).free / 2**20
        logger.warning(
            "a checkpoint could not be written, the next step tries again: step=%d free_mib=%.0f cause=%s",
            self._saving.step, free, problem,
        )  # fmt: skip
        self._saving, self.unsaved = None, problem
        self.checkpoints.clear()

    def load(self) -> None:
        """Go on from `trainer.load_checkpoint_path`, or from the last checkpoint of this run's folder."""
        folder = self._find()
        self.checkpoints.clear()
        if folder is None:
            return
        self.step = checkpoint_step(folder)
        self.workers.load_checkpoint(str(folder))
        if self.loader is not None:  # only validation goes without training rows
            self.loader.load_state_dict(torch.load(folder / LOADER_FILE, weights_only=True))
        self._load_own(folder, json.loads((folder / STATE_FILE).read_text()))
        logger.info("resumed: step=%d path=%s", self.step, folder)

    def _save_own(self, folder: Path) -> dict[str, Any]:
        """Write files of this kind of run; returns what it keeps in `trainer_state.json`."""
        return {}

    def _load_own(self, folder: Path, state: dict[str, Any]) -> None:
        """Take up what `_save_own` wrote and returned."""

    def _find(self) -> Path | None:
        config = self.config
        return checkpoint_to_resume(
            config.checkpoint_folder, config.load_checkpoint_path, config.find_last_checkpoint
        )
