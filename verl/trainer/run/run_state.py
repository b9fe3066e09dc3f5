# SPDX-License-Identifier: Apache-2.0
"""Where a run of reinforcement learning stands: what it saves beside what every run does.

That is `carried_groups.pt` in a checkpoint, if groups of the collector wait for the next step, and in
`trainer_state.json` the weights of the KL penalty and the entropy bonus.
"""

from pathlib import Path
from typing import Any

from verl.algorithms.entropy import EntropyController
from verl.algorithms.kl import KLController
from verl.config.ppo import TrainerConfig
from verl.data.loader import PromptLoader
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.rollouts.collector import RolloutCollector
from verl.trainer.run.checkpointing import SavedRun

GROUPS_FILE = "carried_groups.pt"


class RunState(SavedRun):
    """The step, the score, and everything else that a resumed run needs.

    Attributes:
        kl_controller: Owns the weight of the KL penalty in the rewards.
        entropy_controller: Owns the weight of the entropy bonus.
        collector: Keeps the groups that wait for the next step.
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
        super().__init__(config, training_steps, workers, loader)
        self.kl_controller = kl_controller
        self.entropy_controller = entropy_controller
        self.collector = collector

    def _save_own(self, folder: Path) -> dict[str, Any]:
        self.collector.save_carried(folder / GROUPS_FILE)
        return {
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
            "carried_groups": self.collector.num_carried,
        }

    def _load_own(self, folder: Path, state: dict[str, Any]) -> None:
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.entropy_controller.load_state_dict(state["entropy_controller"])
        if self.loader is not None and state["carried_groups"]:
            self.collector.load_carried(folder / GROUPS_FILE)
