# SPDX-License-Identifier: Apache-2.0
"""The algorithm, as ordinary Python in one CPU process.

`train_step` is a step; `TrainingLoop` runs one after another, validates and saves. Everything else is a
component with one duty: `RolloutCollector` samples, `Validator` validates, `RunState` saves and resumes,
`RolloutLog` writes down what was sampled, the worker group owns the devices.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from verl.config.ppo import PPOConfig
from verl.logger.tracker import Tracker
from verl.protocol import DataProto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.core_algos import (
    apply_kl_penalty,
    compute_advantages,
    correct_rollouts,
    entropy_estimate,
    get_rollout_correction,
    mixed_seed,
    replace_tensors,
    resample_by_score,
    with_tensors,
)
from verl.trainer.metrics import Metrics, StageTimer, compute_batch_metrics
from verl.trainer.rollouts.balancing import balance_over_ranks
from verl.trainer.rollouts.collector import RolloutCollector
from verl.trainer.rollouts.rollout_log import RolloutLog, with_reward_values
from verl.trainer.rollouts.scores import score
from verl.trainer.run.run_state import RunState
from verl.trainer.training_loop import TrainingLoop
from verl.trainer.validation import Validator


class RayPPOTrainer(TrainingLoop):
    """Runs the algorithm from one CPU process; the worker group owns the devices.

    One step: prompts -> rollout -> log_probs -> reward -> advantage -> update.
    The new weights reach the rollout engine when the next rollout wakes it (sync).
    """

    run_state: RunState

    def __init__(
        self,
        config: PPOConfig,
        workers: RayWorkerGroup,
        collector: RolloutCollector,
        validator: Validator,
        run_state: RunState,
        rollout_log: RolloutLog,
        tracker: Tracker,
    ) -> None:
        super().__init__(config.trainer, workers, run_state, tracker)
        self.config = config
        self.collector = collector
        self.validator = validator
        self.rollout_log = rollout_log
        self.correction = get_rollout_correction(config.algorithm.rollout_correction)

    def train_step(self, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """One rollout and its updates. Returns the finished batch and the metrics of its stages."""
        with timer("gen"), self.awake_rollout_engine(timer):
            batch, scoring, metrics = self.collector.collect(self.run_state.step)  # scored on CPU meanwhile
        order, balance_metrics = self.balance(batch, "actor")
        batch, scoring = batch[order], scoring.reorder(order)

        batch = self.evaluate(batch, timer)  # old_log_probs, ref_log_probs, values: what the run needs
        with timer("reward"):
            model_scores = batch.batch.get("reward_model_scores")
            values = scoring.result()
            scores, reward_metrics = score(batch, values, self.config, model_scores)
            batch = replace_tensors(batch, **scores.batch)  # token_level_scores; masks what failed
            batch = with_reward_values(batch, values)
        batch, process_metrics = self.reward_process(batch, timer)
        with timer("adv"):
            batch, advantage_metrics = self.estimate_advantages(batch)
        self.check(batch)
        metrics |= balance_metrics | reward_metrics | process_metrics | advantage_metrics
        metrics |= self.update(batch, timer)
        with timer("keep_rollouts"):
            self.rollout_log.keep(batch, self.run_state.step)
        return batch, metrics

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """Scores, rewards, advantages and lengths of the step's responses."""
        return compute_batch_metrics(batch, self.run_state.step)

    def evaluate(self, batch: DataProto, timer: StageTimer) -> DataProto:
        """Run the models over the responses: adds what each of them says of every token."""
        config, workers = self.config, self.workers
        if config.algorithm.rollout_correction.bypass_mode:
            batch = with_tensors(batch, old_log_probs=batch.batch["rollout_log_probs"])
        else:
            with timer("old"):
                batch = batch.merge(workers.compute_log_probs(batch))  # old_log_probs
        if config.needs_ref_log_probs:
            with timer("ref"):
                batch = batch.merge(workers.compute_ref_log_probs(batch))  # ref_log_probs
        if config.use_critic:
            with timer("values"):
                batch = batch.merge(workers.compute_values(batch))  # values
        if config.worker.reward_model.is_used:
            with timer("reward_model"):
                batch = batch.merge(workers.compute_reward_model_scores(batch))  # reward_model_scores
        return batch

    def reward_process(self, batch: DataProto, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """With PRIME: reward every token, and train the model that does on which responses were right."""
        if not self.config.use_prime:
            return batch, {}
        with timer("prime"):
            batch = with_tensors(batch, accuracies=batch.batch["reward_components"][:, 0])
            batch = batch.merge(self.workers.compute_prime_ref_log_probs(batch))  # prime_ref_log_probs
            if self.config.worker.prime.update == "before":
                metrics = self.update_role("prime", batch)
                return batch.merge(self.workers.compute_process_rewards(batch)), metrics  # process_rewards
            batch = batch.merge(self.workers.compute_process_rewards(batch))
            return batch, self.update_role("prime", batch)

    def estimate_advantages(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """From scores to advantages, corrected for the difference between engine and trainer."""
        algorithm, state = self.config.algorithm, self.run_state
        metrics = {}
        batch, kl_metrics = apply_kl_penalty(batch, state.kl_controller)  # token_level_rewards
        if not algorithm.rollout_correction.bypass_mode:
            batch, metrics = correct_rollouts(batch, self.correction)  # rollout_is_weights, kept_mask
        batch = compute_advantages(batch, algorithm)  # advantages, returns
        state.entropy_controller.update(entropy_estimate(batch))
        if algorithm.use_pf_ppo:
            batch = resample_by_score(batch, algorithm.pf_ppo, self.config.data.seed, state.step)
            batch = batch[self.balance(batch, "actor", group_size=1)[0]]
        return batch, metrics | kl_metrics

    def update(self, batch: DataProto, timer: StageTimer) -> Metrics:
        """Update every model that this step trains."""
        config, state = self.config, self.run_state
        metrics: Metrics = {}
        if config.use_critic:
            with timer("update_critic"):
                metrics |= self.update_role("critic", batch)
        if state.step >= config.trainer.critic_warmup:
            with timer("update_actor"):
                seed = mixed_seed(config.data.seed, state.step)
                metrics |= self.workers.update_actor(batch, state.entropy_controller.coef, seed)[0]
        return metrics  # equal on all ranks

    def update_role(self, role: str, batch: DataProto) -> Metrics:
        """Update the critic or the process reward model, on mini batches of their own size."""
        roles = self.config.trained_roles
        if roles[role].global_batch_size != roles["actor"].global_batch_size:
            batch = batch[batch.batch["row_ids"].argsort(stable=True)]
            batch = batch[self.balance(batch, role, group_size=1)[0]]
        method = {"critic": self.workers.update_critic, "prime": self.workers.update_prime}[role]
        return method(batch)[0]

    def validate(self, timer: StageTimer) -> Metrics:
        """Score responses to the held-out prompts with the current weights."""
        if not self.validator.has_prompts:
            return {}
        with timer("validation"):
            with self.awake_rollout_engine(timer):
                self.validator.sample(self.run_state.step)
            metrics = self.validator.measure()
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

    def balance(
        self, batch: DataProto, role: str, group_size: int | None = None
    ) -> tuple[list[int], Metrics]:
        """Find the order of rows that gives every rank similar work in each mini batch of a role.

        `group_size` rows stay together where that is possible; None is the responses to a prompt.
        """
        group_size = group_size or self.config.worker.rollout.n
        mini_batch_prompts = self.config.trained_roles[role].global_batch_size
        mini_batch_rows = mini_batch_prompts * self.config.worker.rollout.n
        share_prompt = self.config.worker.actor.share_prompt
        return balance_over_ranks(batch, mini_batch_rows, group_size, self.config.dp_size, share_prompt)

    def check(self, batch: DataProto) -> None:
        """Compare the batch with the table of keys, with `trainer.debug=true`."""
        if self.config.trainer.debug:
            batch.check()
