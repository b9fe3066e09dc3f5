# SPDX-License-Identifier: Apache-2.0
"""The loop over training steps, which every kind of training shares."""

import time
from abc import ABC, abstractmethod
from typing import ClassVar

from verl.config.trainer import RunConfig
from verl.logger.console.start_up import finish_start_up, phase
from verl.logger.tracker import Tracker
from verl.protocol import DataProto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.metrics import Metrics, StageTimer, compute_throughput_metrics, compute_timing_metrics
from verl.trainer.profiling.profiles import StepProfiles
from verl.trainer.run.checkpointing import RunState
from verl.trainer.run.end_report import Finished
from verl.trainer.run.stopping import StopRequest


class TrainingLoop(ABC):
    """Repeats `train_step`, and validates, saves and logs, until the last step or a stop signal."""

    validates_by_loss: ClassVar[bool] = False  # the recorded score is the negative of a loss

    def __init__(
        self, run: RunConfig, workers: RayWorkerGroup, run_state: RunState, tracker: Tracker
    ) -> None:
        self.run = run
        self.workers = workers
        self.run_state = run_state
        self.tracker = tracker
        self.stop = StopRequest()
        self.profiles = StepProfiles(run, workers)

    @abstractmethod
    def train_step(self, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """Run one step. Return the finished batch and the metrics of its stages."""

    @abstractmethod
    def batch_metrics(self, batch: DataProto) -> Metrics:
        """Compute statistics of a step's finished batch."""

    @abstractmethod
    def validate(self, timer: StageTimer) -> Metrics:
        """Evaluate the current weights on held-out rows; {} if there are none."""

    def fit(self) -> None:
        """Train from the last checkpoint to the last step, or until a stop signal."""
        self.run_state.load()
        self.first_step = self.run_state.step + 1
        self._started = time.monotonic()
        with self.stop.listening():
            self.train()
            self.run_state.flush()

    def finished(self) -> Finished:
        """Return what `fit` has trained."""
        state = self.run_state
        seconds = time.monotonic() - self._started
        return Finished(self.first_step, state.step, seconds, state.best, self.validates_by_loss)

    def train(self) -> None:
        """Run the remaining steps; with `trainer.val_only` only validate."""
        state = self.run_state
        if self.run.val_before_train or self.run.val_only:
            self._validate_first()
        finish_start_up()
        if self.run.val_only:
            return

        while state.step < state.training_steps and not self.stop.signal:
            state.step += 1
            self.tracker.begin_step(state.step)
            timer = StageTimer(self.tracker.stage)
            with self.profiles.recording(state.step), timer("step"):
                batch, metrics = self.train_step(timer)
                if state.is_due(self.run.val_freq):
                    metrics |= self.validate(timer)
                if state.is_due(self.run.save_freq) or self.stop.signal or state.save_error:
                    with timer("save_checkpoint"):
                        state.save()
                state.publish()
            metrics |= self.batch_metrics(batch) | compute_timing_metrics(batch, timer.seconds)
            metrics |= compute_throughput_metrics(batch, timer.seconds["step"], self.workers.world_size)
            self.tracker.log(metrics, state.step)
            self.profiles.report(state.step, metrics)

    def _validate_first(self) -> None:
        self.tracker.begin_step(self.run_state.step)
        with phase("first validation"):
            metrics = self.validate(StageTimer(self.tracker.stage))
        finish_start_up()
        self.tracker.log(metrics, self.run_state.step)
