# SPDX-License-Identifier: Apache-2.0
"""The loop over training steps, which every kind of training shares."""

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple

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


class Step(NamedTuple):
    """A finished step of training."""

    number: int
    metrics: Metrics
    batch: DataProto  # with every key that its stages wrote


class TrainingLoop(ABC):
    """Repeats `train_step`, and validates, saves and logs, until the last step or a stop signal."""

    validates_by_loss: ClassVar[bool] = False  # the recorded score is the negative of a loss

    def __init__(
        self, run: RunConfig, workers: RayWorkerGroup, run_state: RunState, tracker: Tracker
    ) -> None:
        self.run, self.workers, self.run_state, self.tracker = run, workers, run_state, tracker
        self.stop = StopRequest()
        self.profiles = StepProfiles(run, workers)
        self.last_metrics: Metrics = {}  # of the last step
        self.last_validation: Metrics = {}  # of the last validation
        # Of the last loop over this object.
        self._steps: weakref.ref[Generator[Step, None, None]] | None = None

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
        for _ in self:
            pass

    def __iter__(self) -> Iterator[Step]:
        """Train as `fit` does and yield each finished step; a second loop continues where one ended."""
        self.close()
        steps = self.train()
        self._steps = weakref.ref(steps)  # so that leaving the loop ends it
        return steps

    def close(self) -> None:
        """End a loop over the steps that was left; its last checkpoint is written to the end."""
        steps = None if self._steps is None else self._steps()
        if steps is not None:
            steps.close()

    def finished(self) -> Finished:
        """Return what this object has trained."""
        state = self.run_state
        seconds = time.monotonic() - self._started
        return Finished(self.first_step, state.step, seconds, state.best, self.validates_by_loss)

    def save(self) -> Path | None:
        """Write a checkpoint of the step that is done, and return its folder; None before the first step."""
        if self.run_state.step and not self.run_state.is_saved:
            self.run_state.save()
        self.run_state.flush()
        return self.run_state.saved

    def train(self) -> Generator[Step, None, None]:
        """Resume and run the remaining steps, until the last one or a signal; or only validate."""
        state, is_trained = self.run_state, False
        is_first_loop = self._resume()
        with self.stop.listening(), self._flushing():
            if is_first_loop and (self.run.val_before_train or self.run.val_only):
                self._validate_first()
            finish_start_up()
            while state.step < state.training_steps and not (self.stop.signal or self.run.val_only):
                state.step += 1
                self.tracker.begin_step(state.step)
                timer = StageTimer(self.tracker.stage)
                with self.profiles.recording(state.step), timer("step"):
                    batch, metrics = self.train_step(timer)
                    if state.is_due(self.run.val_freq):
                        self.last_validation = self.validate(timer)
                        metrics |= self.last_validation
                    if state.is_due(self.run.save_freq) or self.stop.signal or state.save_error:
                        with timer("save_checkpoint"):
                            state.save()
                    state.publish()
                metrics |= self.batch_metrics(batch) | compute_timing_metrics(batch, timer.seconds)
                metrics |= compute_throughput_metrics(batch, timer.seconds["step"], self.run.num_processes)
                self.tracker.log(metrics, state.step)
                self.profiles.report(state.step, metrics)
                self.last_metrics, is_trained = metrics, True
                yield Step(state.step, metrics, batch)
            if self.stop.signal and is_trained and not state.is_saved:  # it came between two steps
                state.save()

    def _resume(self) -> bool:
        """Load the last checkpoint, once for this object; return whether that was done now."""
        if self.run_state.is_loaded:
            return False
        self.run_state.load()
        self.first_step = self.run_state.step + 1
        self._started = time.monotonic()
        return True

    @contextmanager
    def _flushing(self) -> Iterator[None]:
        """Wait for the last checkpoint after the block, unless it fails."""
        try:
            yield
        except GeneratorExit:  # the caller left its loop, while all workers live
            self.run_state.flush()
            raise
        self.run_state.flush()

    def _validate_first(self) -> None:
        self.tracker.begin_step(self.run_state.step)
        with phase("first validation"):
            self.last_validation = self.validate(StageTimer(self.tracker.stage))
        finish_start_up()
        self.tracker.log(self.last_validation, self.run_state.step)
