# SPDX-License-Identifier: Apache-2.0
"""The training loop, as ordinary Python in one CPU process.

`fit` runs steps, validates and saves; `train_step` is the algorithm. Everything else is a component with one
duty: `RolloutCollector` samples, `Validator` validates, `RunState` saves and resumes, the worker group owns
the devices.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from verl.protocol import DataProto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.balancing import balance_over_ranks
from verl.trainer.config import PPOConfig
from verl.trainer.core_algos import apply_kl_penalty, compute_advantages
from verl.trainer.metrics import (
    Metrics,
    StageTimer,
    compute_batch_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
)
from verl.trainer.rollout_collector import RolloutCollector, score
from verl.trainer.run_state import RunState
from verl.trainer.validation import Validator
from verl.utils.logger.tracker import Tracker


class RayPPOTrainer:
    """Runs the algorithm from one CPU process; the worker group owns the devices.

    One step: prompts -> rollout -> reward -> log_probs -> advantage -> update.
    The new weights reach the rollout engine when the next rollout wakes it (sync).
    """

    def __init__(
        self,
        config: PPOConfig,
        workers: RayWorkerGroup,
        collector: RolloutCollector,
        validator: Validator,
        run_state: RunState,
        tracker: Tracker,
    ) -> None:
        self.config = config
        self.workers = workers
        self.collector = collector
        self.validator = validator
        self.run_state = run_state
        self.tracker = tracker

    def fit(self) -> None:
        """Train until the last step, validating and saving on the way."""
        trainer, state = self.config.trainer, self.run_state
        state.load()
        if trainer.val_before_train or trainer.val_only:
            self.tracker.begin_step(state.step)
            self.tracker.log(self.validate(StageTimer(self.tracker.stage)), state.step)
        if trainer.val_only:
            return

        while state.step < state.training_steps:
            state.step += 1
            self.tracker.begin_step(state.step)
            timer = StageTimer(self.tracker.stage)
            with timer("step"):
                batch, metrics = self.train_step(timer)
                if self.validator.has_prompts and self.is_due(trainer.val_freq):
                    metrics |= self.validate(timer)
                if self.is_due(trainer.save_freq):
                    with timer("save_checkpoint"):
                        state.save()
            metrics |= compute_batch_metrics(batch) | compute_timing_metrics(batch, timer.seconds)
            metrics |= compute_throughput_metrics(batch, timer.seconds["step"], self.workers.world_size)
            self.tracker.log(metrics, state.step)

    def train_step(self, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """One rollout and one update. Returns the finished batch and the metrics of its stages."""
        with timer("gen"), self.awake_rollout_engine(timer):
            batch, scoring = self.collector.collect(self.run_state.step)  # scored on CPU meanwhile
        order, metrics = self.balance(batch)
        batch, scoring = batch[order], scoring.reorder(order)

        with timer("old"):
            batch = batch.merge(self.workers.compute_log_probs(batch))  # old_log_probs
        if self.config.use_reference:
            with timer("ref"):
                batch = batch.merge(self.workers.compute_ref_log_probs(batch))  # ref_log_probs
        with timer("reward"):
            scores, reward_metrics = score(batch, scoring.result())
            batch = batch.merge(scores)  # token_level_scores
        with timer("adv"):
            batch, kl_metrics = apply_kl_penalty(batch, self.run_state.kl_controller)  # token_level_rewards
            batch = compute_advantages(batch, self.config.algorithm)  # advantages, returns
        self.check(batch)
        with timer("update_actor"):
            update_metrics = self.workers.update_actor(batch)[0]  # equal on all ranks
        return batch, metrics | reward_metrics | kl_metrics | update_metrics

    def validate(self, timer: StageTimer) -> Metrics:
        """Score the held-out prompts with the current weights."""
        with timer("validation"), self.awake_rollout_engine(timer):
            metrics = self.validator.run(self.run_state.step)
        self.run_state.record_score(metrics["val/reward_score"])
        self.tracker.log_generations(self.validator.samples, self.run_state.step)
        return metrics

    @contextmanager
    def awake_rollout_engine(self, timer: StageTimer) -> Iterator[None]:
        """Have the engine awake with the current weights inside the block; asleep after it.

        After an exception nothing is put to sleep: the workers may be gone, and the run ends.
        """
        with timer("sync_weights"):
            self.workers.sync_weights()
        yield
        self.workers.sleep_engine()

    def balance(self, batch: DataProto) -> tuple[list[int], Metrics]:
        """Find the order of rows that gives every rank similar work."""
        group_size = self.config.worker.rollout.n
        mini_batch_rows = self.config.worker.actor.global_batch_size * group_size
        return balance_over_ranks(batch, mini_batch_rows, group_size, self.config.dp_size)

    def check(self, batch: DataProto) -> None:
        """Compare the batch with the table of keys, with `trainer.debug=true`."""
        if self.config.trainer.debug:
            batch.check()

    def is_due(self, frequency: int) -> bool:
        """Whether something that happens every `frequency` steps, and always after the last, happens now."""
        if self.run_state.step == self.run_state.training_steps:
            return True
        return frequency > 0 and self.run_state.step % frequency == 0
