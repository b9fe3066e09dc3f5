# SPDX-License-Identifier: Apache-2.0
"""The steps of a run: what every kind of training has in common, as ordinary Python in one CPU process."""

from abc import ABC, abstractmethod

from verl.config.trainer import RunConfig
from verl.logger.tracker import Tracker
from verl.protocol import DataProto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.metrics import Metrics, StageTimer, compute_throughput_metrics, compute_timing_metrics
from verl.trainer.profiling.profiles import StepProfiles
from verl.trainer.run.checkpointing import SavedRun
from verl.trainer.run.stopping import StopRequest


class TrainingLoop(ABC):
    """Runs steps one after another, validating, saving and logging on the way, until it is asked to stop.

    What a step does is the subclass's `train_step`, how weights are judged its `validate`.
    """

    def __init__(
        self, run: RunConfig, workers: RayWorkerGroup, run_state: SavedRun, tracker: Tracker
    ) -> None:
        """Put the parts together.

        Args:
            run: `trainer`.
            workers: Own the devices and hold the models.
            run_state: Of the run, at its start.
            tracker: Takes the metrics.
        """
        self.run = run
        self.workers = workers
        self.run_state = run_state
        self.tracker = tracker
        self.stop = StopRequest()
        self.profiles = StepProfiles(run, workers)

    @abstractmethod
    def train_step(self, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """Do one step. Returns the finished batch and the metrics of its stages."""

    @abstractmethod
    def batch_metrics(self, batch: DataProto) -> Metrics:
        """What the finished batch of a step says by itself."""

    @abstractmethod
    def validate(self, timer: StageTimer) -> Metrics:
        """Judge the current weights on held-out rows; {} if there are none."""

    def fit(self) -> None:
        """Train until the last step or a request to stop, from where the run stands."""
        self.run_state.load()
        with self.stop.listening():
            self.train()
            self.run_state.settle()

    def train(self) -> None:
        """The steps of the run from where it stands; with `trainer.val_only` just a validation."""
        state = self.run_state
        if self.run.val_before_train or self.run.val_only:
            self._validate_first()
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
                if state.is_due(self.run.save_freq) or self.stop.signal or state.unsaved:
                    with timer("save_checkpoint"):
                        state.save()
                state.publish()  # what was written meanwhile
            metrics |= self.batch_metrics(batch) | compute_timing_metrics(batch, timer.seconds)
            metrics |= compute_throughput_metrics(batch, timer.seconds["step"], self.workers.world_size)
            self.tracker.log(metrics, state.step)
            self.profiles.report(state.step, metrics)

    def _validate_first(self) -> None:
        self.tracker.begin_step(self.run_state.step)
        self.tracker.log(self.validate(StageTimer(self.tracker.stage)), self.run_state.step)
