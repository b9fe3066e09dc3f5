# SPDX-License-Identifier: Apache-2.0
"""Where a run stands, and how it is saved and resumed.

A checkpoint is `global_step_N/` with the workers' folders, the loader's `dataloader.pt`, the collector's
`carried_groups.pt` if groups wait for the next step, and the controller's `trainer_state.json`. It appears
whole or not at all.
"""

import json
from pathlib import Path

import torch

from verl.algorithms.entropy import EntropyController
from verl.algorithms.kl import KLController
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.config import TrainerConfig
from verl.trainer.data_loader import PromptLoader
from verl.trainer.rollout_collector import RolloutCollector
from verl.utils.checkpoint.storage import REMEDY, write_json
from verl.utils.checkpoint.tracker import CheckpointTracker, checkpoint_step, checkpoint_to_resume
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

LOADER_FILE = "dataloader.pt"
GROUPS_FILE = "carried_groups.pt"
STATE_FILE = "trainer_state.json"


class RunState:
    """The step, the score, and everything else that a resumed run needs.

    Attributes:
        step: Training steps done; the one under way counts.
        training_steps: Steps of the whole run.
        kl_controller: Owns the weight of the KL penalty in the rewards.
        entropy_controller: Owns the weight of the entropy bonus.
        saved: The last checkpoint that this object wrote.
    """

    def __init__(
        self,
        config: TrainerConfig,
        training_steps: int,
        kl_controller: KLController,
        entropy_controller: EntropyController,
        workers: RayWorkerGroup,
        loader: PromptLoader | None,
        collector: RolloutCollector,
    ) -> None:
        """Put the parts together; a run that only validates has no loader."""
        self.config = config
        self.training_steps = training_steps
        self.kl_controller = kl_controller
        self.entropy_controller = entropy_controller
        self.workers = workers
        self.loader = loader
        self.collector = collector
        self.step = 0
        self.checkpoints = CheckpointTracker(config.checkpoint_folder, config.save_limit)
        self.saved: Path | None = None
        self._score: tuple[int, float] | None = None  # step and value of the last validation

    def record_score(self, score: float) -> None:
        """Remember the validation score of the current step; the best step's checkpoint is kept."""
        self._score = (self.step, score)

    def save(self) -> Path:
        """Write a checkpoint of the current step; waits for all workers. Returns its folder."""
        folder = self.checkpoints.begin(self.step)
        self.workers.save_checkpoint(str(folder), self.config.save_model_only)
        assert self.loader is not None, "a run that trains has a loader"
        torch.save(self.loader.state_dict(), folder / LOADER_FILE)
        self.collector.save_carried(folder / GROUPS_FILE)
        state = {
            "step": self.step,
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
            "carried_groups": self.collector.num_carried,
        }
        write_json(folder / STATE_FILE, state)
        step, score = self._score or (None, None)
        self.saved = self.checkpoints.publish(self.step, score if step == self.step else None)
        return self.saved

    def load(self) -> None:
        """Go on from `trainer.load_checkpoint_path`, or from the last checkpoint of this run's folder."""
        folder = self._find()
        if folder is None:
            return
        self.step = checkpoint_step(folder)
        self.workers.load_checkpoint(str(folder))
        state = json.loads((folder / STATE_FILE).read_text()) if (folder / STATE_FILE).is_file() else {}
        if state:
            self.kl_controller.load_state_dict(state["kl_controller"])
            self.entropy_controller.load_state_dict(state.get("entropy_controller", {}))
        if self.loader is not None:  # only validation goes without training rows
            _load_position(self.loader, folder)
            _load_groups(self.collector, folder, state.get("carried_groups", 0))
        logger.info("resumed: step=%d path=%s", self.step, folder)

    def _find(self) -> Path | None:
        config = self.config
        return checkpoint_to_resume(
            config.checkpoint_folder, config.load_checkpoint_path, config.find_last_checkpoint
        )


def _load_position(loader: PromptLoader, folder: Path) -> None:
    if (folder / LOADER_FILE).is_file():
        loader.load_state_dict(torch.load(folder / LOADER_FILE, weights_only=True))
    else:
        logger.warning("checkpoint has no loader position, the data starts anew: path=%s", folder)


def _load_groups(collector: RolloutCollector, folder: Path, num_groups: int) -> None:
    if num_groups == 0:
        return
    if not (folder / GROUPS_FILE).is_file():
        raise FileNotFoundError(f"{folder / GROUPS_FILE} is missing: {REMEDY}")
    collector.load_carried(folder / GROUPS_FILE)
