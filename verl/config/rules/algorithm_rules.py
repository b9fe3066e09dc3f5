# SPDX-License-Identifier: Apache-2.0
"""Rules between the algorithm and the other sections. To add one, add a generator and call it above."""

from collections.abc import Iterator
from dataclasses import fields

from verl.config.algorithm import WITHIN_GROUPS, AlgorithmConfig
from verl.config.data import DataConfig
from verl.config.files.paths import is_extension
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import TrainerConfig
from verl.config.worker import WorkerConfig


def algorithm_problems(
    data: DataConfig, worker: WorkerConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield every combination that makes no sense, except of `group_problems`."""
    yield from _filters(algorithm, worker, trainer)
    if algorithm.early_stop.is_used:
        yield from _early_stop(algorithm, worker.rollout, trainer)
    if algorithm.replay_max_age is not None:
        yield from _replay(algorithm, trainer)
    yield from _critic(algorithm, worker, trainer)
    yield from _prime(algorithm, worker)
    yield from _bypass(algorithm, worker)
    yield from _rewards(algorithm, worker, data)


def group_problems(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield why the responses to a prompt are too few."""
    needs = []
    estimator = algorithm.adv_estimator
    if "group" in algorithm.needs:
        needs.append(f"algorithm.adv_estimator={estimator}")
    if algorithm.online_filtering or trainer.rejection_sample:
        option = "algorithm.online_filtering" if algorithm.online_filtering else "trainer.rejection_sample"
        needs.append(f"{option}=true")
    if needs and rollout.n < 2:
        which = " and ".join(f"`{need}`" for need in needs)
        yield (
            f"`worker.rollout.n` must be at least 2 with {which}, got {rollout.n}:"
            " it compares the responses to one prompt"
        )
    if "reward_baselines" in algorithm.needs and rollout.top_k == 1:
        yield (
            f"`worker.rollout.top_k` must not be 1 with `algorithm.adv_estimator={estimator}`: every response"
            " would equal the greedy baseline"
        )


def _filters(algorithm: AlgorithmConfig, worker: WorkerConfig, trainer: TrainerConfig) -> Iterator[str]:
    if algorithm.online_filtering and trainer.rejection_sample:
        yield "`algorithm.online_filtering` and `trainer.rejection_sample` must not both be true: choose one"
    if trainer.rejection_sample_multiplier > 1 and not trainer.rejection_sample:
        yield "`trainer.rejection_sample_multiplier` above 1 needs `trainer.rejection_sample=true`"
    if (algorithm.online_filtering or trainer.rejection_sample) and not worker.scores_when_sampled:
        yield "`worker.reward.reward_function` must be set to filter prompts: sampling sees only its scores"


def _with_a_filter(
    key: str, value: int | None, algorithm: AlgorithmConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield why an option for steps that a filter fills has no use."""
    if not algorithm.online_filtering and not trainer.rejection_sample:
        yield (
            f"{key} ({value}) needs a filter that leaves prompts out: `algorithm.online_filtering=true` or"
            " `trainer.rejection_sample=true`"
        )
    mode = trainer.async_training.mode
    if trainer.async_training.continues_responses:
        yield (
            f"{key} must be null with `trainer.async_training.mode={mode}`, got {value}: that samples groups"
            " one by one, for no step in particular; use off or one_step_off"
        )


def _replay(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Iterator[str]:
    key, correction = "`algorithm.replay_max_age`", algorithm.rollout_correction
    yield from _with_a_filter(key, algorithm.replay_max_age, algorithm, trainer)
    if correction.rollout_is is None and not correction.bypass_mode:
        yield (
            f"{key} ({algorithm.replay_max_age}) needs `algorithm.rollout_correction.rollout_is=token` or"
            " =sequence, or `algorithm.rollout_correction.bypass_mode=true`: older weights sampled the groups"
        )


def _early_stop(algorithm: AlgorithmConfig, rollout: RolloutConfig, trainer: TrainerConfig) -> Iterator[str]:
    key, after = "`algorithm.early_stop.after`", algorithm.early_stop.after
    yield from _with_a_filter(key, after, algorithm, trainer)
    if after is not None and after >= rollout.n:
        yield f"{key} ({after}) must be below `worker.rollout.n` ({rollout.n}): else there is nothing to stop"
    estimator = algorithm.adv_estimator
    if not is_extension(estimator) and estimator not in WITHIN_GROUPS:
        yield (
            f"{key} must be null with `algorithm.adv_estimator={estimator}`, which compares the responses of"
            f" several prompts and would have to weigh them: use one of {', '.join(WITHIN_GROUPS)}"
        )
    correction = algorithm.rollout_correction
    for option, value in (
        ("algorithm.use_pf_ppo", algorithm.use_pf_ppo),
        ("algorithm.rollout_correction.rollout_is_batch_normalize", correction.rollout_is_batch_normalize),
        ("trainer.diffusion", trainer.diffusion),
    ):
        if value:
            yield f"{key} must be null with `{option}=true`, got {after}"


def _critic(algorithm: AlgorithmConfig, worker: WorkerConfig, trainer: TrainerConfig) -> Iterator[str]:
    estimator = algorithm.adv_estimator
    if algorithm.use_critic and worker.critic.model.model_path is None:
        yield (
            f"`worker.critic.model.model_path` must be set with `algorithm.adv_estimator={estimator}`,"
            " usually to the actor's model; or choose an estimator without a critic, such as grpo"
        )
    if trainer.critic_warmup and not algorithm.use_critic:
        yield (
            f"`trainer.critic_warmup` ({trainer.critic_warmup}) must be 0 with"
            f" `algorithm.adv_estimator={estimator}`, which has no critic"
        )


def _prime(algorithm: AlgorithmConfig, worker: WorkerConfig) -> Iterator[str]:
    # Without `model_path` PRIME uses the actor's model config, so its other model options are ignored.
    model, default = worker.prime.model, ModelConfig()
    if not algorithm.use_prime or model.model_path is not None:
        return
    for entry in fields(model):
        if getattr(model, entry.name) != getattr(default, entry.name):
            yield (
                f"`worker.prime.model.{entry.name}` has no effect without `worker.prime.model.model_path`:"
                " set that, or remove this option to use the actor's model with its options"
            )


def _bypass(algorithm: AlgorithmConfig, worker: WorkerConfig) -> Iterator[str]:
    if not algorithm.rollout_correction.bypass_mode:
        return
    key, why = "algorithm.rollout_correction.bypass_mode", "which needs the log-probs pass that it skips"
    if "sum_squared_probs" in algorithm.needs:
        yield f"`{key}` must be false with `algorithm.adv_estimator={algorithm.adv_estimator}`, {why}"
    if algorithm.use_reference and not algorithm.use_kl_loss and algorithm.kl_penalty == "full":
        yield f"`{key}` must be false with `algorithm.kl_penalty=full` in the rewards, {why}"
    if worker.actor.router_replay == "r2":
        yield f"`{key}` must be false with `worker.actor.router_replay=r2`, {why}; or use r3"


def _rewards(algorithm: AlgorithmConfig, worker: WorkerConfig, data: DataConfig) -> Iterator[str]:
    reward, estimator = worker.reward, algorithm.adv_estimator
    if reward.overlong_buffer_length > data.max_response_length:
        yield (
            f"`worker.reward.overlong_buffer_length` ({reward.overlong_buffer_length}) must be at most"
            f" `data.max_response_length` ({data.max_response_length})"
        )
    if "reward_baselines" in algorithm.needs and worker.reward_model.is_used:
        yield (
            f"`worker.reward_model.model.model_path` must be null with `algorithm.adv_estimator={estimator}`:"
            " only the reward function scores the greedy baseline"
        )
    if not algorithm.needs & {"reward_components", "process_rewards"}:
        return
    only = " only" if estimator in ("gdpo", "prime") else ""
    why = f"with `algorithm.adv_estimator={estimator}`, which reads components of the reward function{only}"
    if worker.scoring.reward_function is None:
        yield f"`worker.reward.reward_function` must be set {why}"
    if not only:
        return  # an estimator of a file may read the overall score as well
    # Whatever is added to the overall score would be lost.
    if reward.overlong_buffer_length:
        yield f"`worker.reward.overlong_buffer_length` must be 0 {why}"
    if worker.reward_model.is_used:
        yield f"`worker.reward_model.model.model_path` must be null {why}"
