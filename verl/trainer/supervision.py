# SPDX-License-Identifier: Apache-2.0
"""A run that survives the loss of its workers: started again from its last checkpoint.

A worker that was killed, ran out of memory, is stopped, or makes no progress ends its group (`WorkerError`,
with rank and phase). With `trainer.max_restarts` everything is then put together anew and goes on. An
exception that a worker raised is not the machine's fault and would come again: it ends the run.
"""

import time
from dataclasses import replace
from pathlib import Path

from verl.single_controller.ray.failure import WorkerError
from verl.trainer.config import PPOConfig
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.setup import running_trainer
from verl.utils.rank_logger import get_logger

REPORT = "failures.log"  # in the checkpoint folder: what failed when, with the stacks of ranks that hung

logger = get_logger(__name__)


class Supervisor:
    """Trains to the end, through as many failures of workers as `trainer.max_restarts` allows.

    Example::

        supervisor = Supervisor(config)
        sys.exit(supervisor.run())

    Attributes:
        step: The step that is, or was, under way; None before the run was put together.
        restarts: How often it was started again.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.step: int | None = None
        self.restarts = 0

    def run(self) -> int:
        """Train; returns the exit status: 0, or that of a signal which left steps undone.

        Raises:
            WorkerError: A worker failed once too often, or raised.
        """
        while True:
            trainer = None
            try:
                with running_trainer(self.config) as trainer:
                    try:
                        trainer.fit()
                        is_done = trainer.run_state.step >= trainer.run_state.training_steps
                        return 0 if is_done else trainer.stop.exit_status
                    finally:
                        self.step = trainer.run_state.step
            except WorkerError as error:
                if trainer is None:
                    raise
                self._report(error)
                if not error.may_go_away or self.restarts >= self.config.trainer.max_restarts:
                    raise
                self._start_again(trainer, error)

    def _start_again(self, trainer: RayPPOTrainer, error: WorkerError) -> None:
        """Let the next attempt begin at the last checkpoint of this one, or where this one began."""
        self.restarts += 1
        saved = trainer.run_state.saved
        if saved is not None:
            options = replace(self.config.trainer, load_checkpoint_path=str(saved))
            self.config = replace(self.config, trainer=options)
        logger.warning(
            "starting again: restart=%d of=%d lost_step=%s from=%s cause=%s",
            self.restarts,
            self.config.trainer.max_restarts,
            self.step,
            saved or "where the run began",
            str(error).splitlines()[0],
        )

    def _report(self, error: WorkerError) -> None:
        folder = Path(self.config.trainer.checkpoint_folder)
        folder.mkdir(parents=True, exist_ok=True)
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        with (folder / REPORT).open("a") as file:
            file.write(f"=== {moment}, step {self.step}, restarts before: {self.restarts}\n{error}\n\n")
