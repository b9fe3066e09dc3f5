# SPDX-License-Identifier: Apache-2.0
"""Builds the trainer of a run from its config, for both kinds of training.

The order is that of failing early: reward function and data are checked before a model is loaded. To add a
component: build it in `build_trainer` from its section, and hand it to the trainer.
"""

import dataclasses
import os
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from verl.algorithms.controllers import get_entropy_controller, get_kl_controller
from verl.algorithms.kl import KLLoss
from verl.checkpoint.tracker import checkpoint_step
from verl.config.algorithm import EXACT_KL
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.config.trainer import PARTIAL, STREAM, AsyncConfig, RunTree, TrainerConfig
from verl.config.worker import RewardConfig, WorkerConfig
from verl.data.loader import Loaders, PromptLoader, SampledLoader, make_loaders, make_sft_loaders
from verl.data.media.cache import MediaCache
from verl.data.media.sizes import MediaOptions
from verl.data.readers import Readers, load_readers, media_options
from verl.data.rl_dataset import show_to_teachers
from verl.data.teachers import TeacherColumn, check_teacher_tokens
from verl.distributed.device import is_gpu
from verl.logger.base import Run
from verl.logger.console.start_up import phase
from verl.logger.tracker import Tracker
from verl.planning.planned_run import planned_ppo, planned_sft
from verl.planning.step_needs import StepNeeds
from verl.planning.step_plan import make_plan, make_sft_plan
from verl.protocol import DataProto
from verl.rewards.manager import NoRewardFunction, RewardManager
from verl.rewards.servers import endpoint_arguments
from verl.trainer.kinds.text import TextRun
from verl.trainer.metrics import Metrics, StageTimer, metrics_by_source
from verl.trainer.prepare import PreparedRun
from verl.trainer.prime import PrimeRewards
from verl.trainer.ray_trainer import RayPPOTrainer, RewardStage
from verl.trainer.reward_servers.servers import RewardServers
from verl.trainer.rollouts.balancing import Balancer
from verl.trainer.rollouts.collector import RolloutCollector
from verl.trainer.rollouts.engines import Engines, OwnEngines, SharedEngines
from verl.trainer.rollouts.group_filter import check_scored_alone
from verl.trainer.rollouts.group_stream import PartialRollouts
from verl.trainer.rollouts.schedule import InTurn, OneStepAhead, Schedule
from verl.trainer.rollouts.stream import Stream
from verl.trainer.run.checkpointing import PPORunState, RunState, done_before
from verl.trainer.run.resuming import check_resume, origin_of
from verl.trainer.served_teachers import ServedTeachers, TeacherModel
from verl.trainer.sft_trainer import SFTTrainer
from verl.trainer.start_workers import start_workers, start_workers_and_engines
from verl.workers.run_options import ModelRunOptions, RunOptions
from verl.workers.sft_worker import SFTWorker


def build_trainer(run: PreparedRun[PPOConfig], stack: ExitStack) -> RayPPOTrainer:
    """Open the data of a run, start its workers, and return its trainer; the stack ends what it uses.

    Raises:
        ValueError: Data, template or reward function cannot be used.
    """
    config, pool = run.config, run.pool
    data, worker, algorithm, trainer = config.data, config.worker, config.algorithm, config.trainer
    folder, kind = Path(trainer.checkpoint_folder), kind_of(data, worker, trainer)
    with phase("data"):
        cache = open_cache(stack)
        servers = RewardServers(config.reward_servers, pool.device, folder, config.num_devices)
        stack.enter_context(servers)
        reward = open_reward(stack, worker.scoring, folder, servers)
        check_scored_alone(algorithm.early_stop, reward, worker.reward.batch_size)
        media = media_options(data, worker.rollout)
        readers = kind.readers(media, cache)
        loaders = open_prompts(data, config.distillation, readers, folder, media, cache)
        origin = origin_of(config, planned_ppo(config).models)
        checkpoint = check_resume(config, origin, loaders.train)
    rows = data.rollout_batch_size
    steps = make_plan(config, num_rows(loaders), done_before(checkpoint, rows)).training_steps or 0
    options = ppo_options(
        run, model_options(run, steps, media, cache), config.models, readers.tools,
        in_lockstep=trainer.async_training.deterministic,
    )  # fmt: skip
    servers.start_own()
    workers, engines = start_workers_and_engines(run, stack, kind.worker_class, options)
    servers.start_shared_and_wait(workers.processes)
    tracker = stack.enter_context(open_tracker(config, steps, checkpoint))

    rollout_log = kind.rollout_log(readers)
    on_scored = loaders.train.see if isinstance(loaders.train, SampledLoader) else None
    sampler = kind.sampler(engines, reward, readers, tracker, rollout_log, on_scored)
    mini_batches = {role: section.global_batch_size for role, section in config.trained_roles.items()}
    collector = kind.collector(sampler, endless(loaders.train), mini_batches.values(), algorithm)
    at_once = worker.rollout.sequences_at_once(is_gpu(pool.device))
    sampling = make_schedule(engines, collector, trainer.async_training, steps, at_once)
    balancer = Balancer(config.dp_size, worker.rollout.n, mini_batches, worker.actor.share_prompt)
    prime = [PrimeRewards(workers, balancer, worker.prime.update)] if algorithm.use_prime else []
    stages = [*prime, *([servers.metrics] if servers.models else []), *row_stages(loaders, data)]
    validator = kind.validator(sampler, workers, loaders.val, config.dp_size)
    run_state = PPORunState(
        trainer, steps, rows, workers, loaders.train, origin, kl_controller=get_kl_controller(algorithm),
        entropy_controller=get_entropy_controller(worker.actor), sampling=sampling,
    )  # fmt: skip
    teachers = open_served_teachers(config.distillation, servers)
    return RayPPOTrainer(
        config, workers, sampling, balancer, stages, validator, run_state, rollout_log, tracker, teachers
    )


def build_sft_trainer(run: PreparedRun[SFTConfig], stack: ExitStack) -> SFTTrainer:
    """Open the data of a fine-tuning run and start its workers, as `build_trainer` does."""
    config = run.config
    data, worker, trainer = config.data, config.worker, config.trainer
    folder = Path(trainer.checkpoint_folder)
    with phase("data"):
        cache = open_cache(stack)
        media = media_options(data, data)
        readers = load_readers(worker.actor.model, data.override_chat_template, media, cache)
        check_teacher_tokens(config.distillation, readers.tokenizer)
        teachers = TeacherColumn.of(config.distillation)
        loaders = make_sft_loaders(data, worker.actor.global_batch_size, readers, folder, teachers)
        origin = origin_of(config, planned_sft(config).models)
        checkpoint = check_resume(config, origin, loaders.train)
    rows = worker.actor.global_batch_size
    plan = make_sft_plan(config, num_rows(loaders), done_before(checkpoint, rows))
    training_steps = plan.training_steps or 0

    options = model_options(run, training_steps, media, cache)
    workers = start_workers(run, stack, SFTWorker, options)
    tracker = stack.enter_context(open_tracker(config, training_steps, checkpoint))
    run_state = RunState(trainer, training_steps, rows, workers, loaders.train, origin)
    batches = endless(loaders.train)
    return SFTTrainer(trainer, workers, batches, loaders.val, config.dp_size, run_state, tracker)


def kind_of(data: DataConfig, worker: WorkerConfig, trainer: TrainerConfig) -> TextRun:
    """Return the kind of a run: text or pictures."""
    if not trainer.diffusion:
        return TextRun(data, worker, trainer)
    from verl.trainer.kinds.pictures import PictureRun  # noqa: PLC0415 - a text run needs no diffusers

    return PictureRun(data, worker, trainer)


def open_cache(stack: ExitStack) -> MediaCache:
    cache = MediaCache(f"{os.getpid()}-{uuid.uuid4().hex[:8]}", owner=True)
    stack.callback(cache.close)
    return cache


def open_reward(
    stack: ExitStack, reward: RewardConfig, folder: Path, servers: RewardServers
) -> RewardManager | NoRewardFunction:
    if reward.reward_function is None:
        return NoRewardFunction()
    awake = servers.awake if servers.share_devices else None
    return stack.enter_context(RewardManager(reward, folder / "reward_failures.jsonl", servers.judges, awake))


def open_prompts(
    data: DataConfig,
    distillation: DistillationConfig,
    readers: Readers,
    folder: Path,
    media: MediaOptions,
    cache: MediaCache,
) -> Loaders:
    """Open the rows of a run, which name their teachers if it distills."""
    check_teacher_tokens(distillation, readers.tokenizer)
    loaders = make_loaders(data, readers, folder, TeacherColumn.of(distillation))
    if loaders.train is not None:
        show_to_teachers(loaders.train.dataset, data, distillation, media, cache)
    return loaders


def open_served_teachers(distillation: DistillationConfig, servers: RewardServers) -> ServedTeachers | None:
    """Return None unless a teacher runs behind a server."""
    if not distillation.served:
        return None
    numbers = {name: number for number, name in enumerate(distillation.teachers)}
    teachers = {
        numbers[name]: TeacherModel(name=name, **endpoint_arguments(servers.specs[str(teacher.server)]))
        for name, teacher in distillation.served.items()
    }
    return ServedTeachers(teachers, distillation.distillation_loss)


def row_stages(loaders: Loaders, data: DataConfig) -> list[RewardStage]:
    """Return the reward stage that adds the metrics of the training rows, if there are any rows."""
    loader, is_mixed = loaders.train, len(data.files_by_source("train_files")) > 1
    if loader is None:
        return []

    def measure(batch: DataProto, timer: StageTimer) -> tuple[DataProto, Metrics]:
        by_source = metrics_by_source(batch, data.source_key) if is_mixed else Metrics()
        return batch, by_source | loader.metrics()

    return [measure]


def num_rows(loaders: Loaders) -> int:
    return len(loaders.train.dataset) if loaders.train else 0


def model_options(
    run: PreparedRun[Any], training_steps: int, media: MediaOptions, cache: MediaCache
) -> ModelRunOptions:
    data = run.config.data
    return ModelRunOptions(
        run.pool.device, training_steps, media, cache, data.override_chat_template, data.seed,
        distillation=run.config.distillation,
    )  # fmt: skip


def ppo_options(
    run: PreparedRun[Any],
    shared: ModelRunOptions,
    models: Collection[str],
    tools: Sequence[Mapping[str, Any]],  # schemas
    *,
    in_lockstep: bool = False,
) -> RunOptions:
    """Collect the options outside `worker` that the workers read; `models` are the run's roles."""
    config: PPOConfig = run.config
    data, algorithm, correction = config.data, config.algorithm, config.algorithm.rollout_correction
    has_old_pass = StepNeeds.of(config).old_pass
    use_reference = "ref" in models
    has_kl_loss = use_reference and algorithm.use_kl_loss
    has_full_kl = use_reference and algorithm.kl_penalty in EXACT_KL
    return RunOptions(
        **vars(shared),
        template_variables=data.apply_chat_template_kwargs,
        tools=tools,
        in_lockstep=in_lockstep,
        max_sequence_length=data.max_prompt_length + data.max_response_length,
        max_response_length=data.max_response_length,
        use_reference=use_reference,
        use_critic="critic" in models,
        use_prime="prime" in models,
        kl_loss=KLLoss(algorithm.kl_penalty, algorithm.kl_coef) if has_kl_loss else None,
        has_full_kl_in_rewards=has_full_kl and not has_kl_loss,
        has_sum_squares="sum_squared_probs" in algorithm.needs,
        rollout_correction=correction,
        corrects_in_update=not has_old_pass and (correction.bypass_mode or correction.rollout_is is not None),
        accuracy_key=algorithm.prime_accuracy_key,
    )


def make_schedule(
    engines: Engines, collector: RolloutCollector, config: AsyncConfig, last_step: int, at_once: int
) -> Schedule:
    """Return when each step samples; the engines sample `at_once` responses together."""
    if isinstance(engines, SharedEngines):
        if config.mode == PARTIAL:
            return PartialRollouts(engines, collector, config, last_step, at_once)
        return InTurn(engines, collector)
    assert isinstance(engines, OwnEngines), "there are two kinds"
    if config.mode == STREAM:
        return Stream(engines, collector, config, last_step, at_once)
    return OneStepAhead(engines, collector, last_step) if config.samples_ahead else InTurn(engines, collector)


def open_tracker(config: RunTree, training_steps: int, checkpoint: Path | None) -> Tracker:
    """Open the loggers of a run, which record its config; one that resumes its checkpoint continues them."""
    trainer, folder = config.trainer, Path(config.trainer.checkpoint_folder)
    if checkpoint is not None and checkpoint.resolve().parent != folder.resolve():
        checkpoint = None  # of another run, whose curves this one does not continue
    run = Run(
        project_name=trainer.project_name,
        experiment_name=trainer.experiment_name,
        directory=folder,
        config=dataclasses.asdict(config),
        total_steps=training_steps,
        resumed_step=None if checkpoint is None else checkpoint_step(checkpoint),
        console=trainer.console,
    )
    return Tracker(trainer.logger, run)


def endless(loader: PromptLoader | None) -> Iterator[DataProto]:
    """Yield the batches of one epoch after another."""
    assert loader is not None, "only a run that only validates has no training rows"
    while True:
        yield from loader
