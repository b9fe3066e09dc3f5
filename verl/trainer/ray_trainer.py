# SPDX-License-Identifier: Apache-2.0
"""The algorithm, as ordinary Python in one CPU process.

`train_step` is one step; `TrainingLoop` repeats it, validates and saves. Everything else is a component with
one duty: a `Schedule` has prompts sampled, `Validator` validates, `PPORunState` saves and resumes,
`RolloutLog` records what was sampled, the worker group owns the devices. To change the order of a step:
`train_step`.
"""

import math
from collections.abc import Callable, Sequence

from verl.config.ppo import PPOConfig
from verl.logger.tracker import Tracker
from verl.planning.step_needs import StepNeeds
from verl.protocol import DataProto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.core_algos import (
    add_teacher_advantages,
    apply_kl_penalty,
    compute_advantages,
    correct_rollouts,
    entropy_estimate,
    measure_mismatch,
    mixed_seed,
    no_advantages,
    resample_by_score,
)
from verl.trainer.metrics import Metrics, StageTimer, compute_batch_metrics
from verl.trainer.rollouts.balancing import Balancer
from verl.trainer.rollouts.rollout_log import RolloutLog
from verl.trainer.rollouts.schedule import Schedule
from verl.trainer.rollouts.scores import Scoring, score
from verl.trainer.run.checkpointing import PPORunState
from verl.trainer.served_teachers import ServedTeachers
from verl.trainer.training_loop import TrainingLoop
from verl.trainer.validation import NO_SCORE, Validator
from verl.utils.rank_logger import get_logger
from verl.viewer.rollout_store import VALIDATION

RewardStage = Callable[[DataProto, StageTimer], tuple[DataProto, Metrics]]

logger = get_logger(__name__)


class RayPPOTrainer(TrainingLoop):
    """Runs the algorithm from one CPU process; the worker group owns the devices.

    One step: prompts -> rollout -> log_probs -> reward -> advantage -> update.
    The new weights reach the rollout engines when the schedule has them sample again (sync).
    """

    run_state: PPORunState

    def __init__(
        self,
        config: PPOConfig,
        workers: RayWorkerGroup,
        sampling: Schedule,
        balancer: Balancer,
        reward_stages: Sequence[RewardStage],
        validator: Validator,
        run_state: PPORunState,
        rollout_log: RolloutLog,
        tracker: Tracker,
        served_teachers: ServedTeachers | None = None,
    ) -> None:
        super().__init__(config.trainer, workers, run_state, tracker)
        self.config = config
        self.needs = StepNeeds.of(config)
        self.sampling, self.balancer, self.reward_stages = sampling, balancer, reward_stages
        self.validator, self.rollout_log, self.served_teachers = validator, rollout_log, served_teachers

    def train_step(self, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """Run one rollout and its updates. Return the finished batch and the metrics of its stages."""
        with timer("gen"):
            collected = self.sampling.collect(self.run_state.step, timer)  # scored on CPU from here on
        batch, scoring, metrics = self.balancer.spread(collected)

        batch = self.run_forward_passes(batch, timer)  # ref_log_probs, values, usually old_log_probs
        batch, reward_metrics = self.reward(batch, scoring, timer)  # token_level_scores
        with timer("adv"):
            batch, advantage_metrics = self.estimate_advantages(batch)  # advantages, returns
        self.check(batch)
        batch, update_metrics = self.update(batch, timer)
        metrics |= reward_metrics | advantage_metrics | update_metrics

        with timer("keep_rollouts"):
            self.rollout_log.keep(batch, self.run_state.step)
        return batch, metrics

    def run_forward_passes(self, batch: DataProto, timer: StageTimer) -> DataProto:
        """Run the models over the responses, as far as the algorithm needs their outputs."""
        config, needs, workers = self.config, self.needs, self.workers
        if needs.sampled_log_probs:
            batch = batch.merge({"old_log_probs": batch.batch["rollout_log_probs"]})
        elif needs.old_pass:
            with timer("old"):
                batch = batch.merge(workers.compute_log_probs(batch))  # old_log_probs
        if needs.ref_pass:
            with timer("ref"):
                batch = batch.merge(workers.compute_ref_log_probs(batch))  # ref_log_probs
        if config.distillation.reads_teacher_log_probs and config.distillation.loaded:
            with timer("teacher"):
                batch = batch.merge(workers.compute_teacher_log_probs(batch))  # teacher_log_probs
        if self.served_teachers is not None:
            with timer("teacher"):
                batch = self.served_teachers.add_to(batch)  # teacher_log_probs or teacher_top_*
        if config.algorithm.use_critic:
            with timer("values"):
                batch = batch.merge(workers.compute_values(batch))  # values
        if config.worker.reward_model.is_used:
            with timer("reward_model"):
                batch = batch.merge(workers.compute_reward_model_scores(batch))  # reward_model_scores
        return batch

    def reward(self, batch: DataProto, scoring: Scoring, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """Wait for the scores and put them on tokens, then run the stages that add to them (PRIME)."""
        with timer("reward"):
            values = scoring.result()
            batch, metrics = score(batch, values, self.config.worker, self.config.algorithm)
        if all(map(math.isnan, values["overall"])):
            logger.warning("%s; nothing was learned: step %d", NO_SCORE, self.run_state.step)
        for stage in self.reward_stages:
            batch, stage_metrics = stage(batch, timer)
            metrics |= stage_metrics
        return batch, metrics

    def estimate_advantages(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Turn scores into advantages, corrected for the mismatch between engine and trainer."""
        algorithm, distillation, state = self.config.algorithm, self.config.distillation, self.run_state
        metrics = {}
        batch, kl_metrics = apply_kl_penalty(batch, state.kl_controller)  # token_level_rewards
        if self.needs.old_pass:
            batch, metrics = correct_rollouts(batch, algorithm.rollout_correction)  # weights, kept_mask
        alone = distillation.is_alone
        batch = no_advantages(batch) if alone else compute_advantages(batch, algorithm)  # advantages, returns
        if distillation.rewards_tokens:
            batch, teacher_metrics = add_teacher_advantages(batch, distillation)
            metrics |= teacher_metrics
        if "old_log_probs" in batch.batch:
            state.entropy_controller.update(entropy_estimate(batch))
        if algorithm.use_pf_ppo:
            batch = resample_by_score(batch, algorithm.pf_ppo, self.config.data.seed, state.step)
            batch = self.balancer.spread_rows(batch)
        return batch, metrics | kl_metrics

    def update(self, batch: DataProto, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """Update every model that this step trains."""
        config, state = self.config, self.run_state
        metrics: Metrics = {}
        if config.algorithm.use_critic:
            with timer("update_critic"):
                metrics |= self.workers.update_critic(self.balancer.for_update(batch, "critic"))[0]
        if state.step >= config.trainer.critic_warmup:
            with timer("update_actor"):
                seed = mixed_seed(config.data.seed, state.step)
                results = self.workers.update_actor(batch, state.entropy_controller.coef, seed)
            metrics |= results[0].metrics  # equal on all ranks
            if "old_log_probs" not in batch.batch:
                batch = batch.merge(DataProto.concat([result.columns for result in results]))
                metrics |= measure_mismatch(batch, config.algorithm.rollout_correction)
        return batch, metrics

    def batch_metrics(self, batch: DataProto) -> Metrics:
        return compute_batch_metrics(batch, self.run_state.step)

    def validate(self, timer: StageTimer) -> Metrics:
        """Score responses to the held-out prompts with the current weights."""
        if self.validator.loader is None:
            return {}
        with timer("validation"):
            with self.sampling.current(self.run_state.step, timer):
                self.validator.sample(self.run_state.step)
            metrics = self.validator.measure()
        if "val/reward_score" in metrics:
            self.run_state.record_score(metrics["val/reward_score"])
        else:
            logger.warning("%s; training continues: validation after step %d", NO_SCORE, self.run_state.step)
        self.tracker.log_generations(self.validator.samples, self.run_state.step)
        if self.validator.recorded is not None:
            with timer("keep_rollouts"):
                self.rollout_log.keep(self.validator.recorded, self.run_state.step, VALIDATION)
        return metrics

    def check(self, batch: DataProto) -> None:
        if self.config.trainer.debug:
            batch.check()
