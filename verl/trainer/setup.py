# SPDX-License-Identifier: Apache-2.0
"""Builds the trainer of a run from its config, for both kinds of training.

The order is that of failing early: reward function and data are checked before a model is loaded. To add a
component: build it in `running_trainer` from its section, and hand it to the trainer.
"""

import dataclasses
import os
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray

from verl.algorithms.controllers import get_entropy_controller, get_kl_controller
from verl.algorithms.kl import KLLoss
from verl.config.algorithm import EXACT_KL, AlgorithmConfig
from verl.config.async_training import PARTIAL, STREAM, AsyncConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.config.trainer import RunConfig, RunTree, TrainerConfig
from verl.config.worker import RewardConfig, WorkerConfig
from verl.data.loader import Loaders, PromptLoader, make_loaders, make_sft_loaders, show_to_teachers
from verl.data.media.cache import MediaCache
from verl.data.readers import load_readers, media_options
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
from verl.single_controller.ray.processes import WorkerProcesses
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.trainer.evaluation.categories import Categories
from verl.trainer.kinds.interface import RunKind
from verl.trainer.kinds.starting import start_workers
from verl.trainer.kinds.text import TextRun
from verl.trainer.prime import PrimeRewards
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.reward_servers.servers import RewardServers
from verl.trainer.rollouts.balancing import Balancer
from verl.trainer.rollouts.collector import RolloutCollector
from verl.trainer.rollouts.early_stop import check_scored_alone, make_early_stop
from verl.trainer.rollouts.engines import Engines, OwnEngines, SharedEngines
from verl.trainer.rollouts.group_filter import make_group_filter, make_quota
from verl.trainer.rollouts.group_stream import PartialRollouts
from verl.trainer.rollouts.schedule import InTurn, OneStepAhead, Schedule
from verl.trainer.rollouts.stream import Stream
from verl.trainer.run.checkpointing import PPORunState, RunState
from verl.trainer.run.resuming import check_resume, origin_of
from verl.trainer.served_teachers import ServedTeachers
from verl.trainer.sft_trainer import SFTTrainer
from verl.trainer.validation import Validator
from verl.workers.run_options import ModelRunOptions, RunOptions
from verl.workers.sft_worker import SFTWorker


@contextmanager
def running_trainer(
    config: PPOConfig, pool: ResourcePool, processes: WorkerProcesses | None = None
) -> Iterator[RayPPOTrainer]:
    """Start the workers of a run, in `processes` or new ones, and yield its trainer; they end with the block.

    Example::

        config = load_config(PPOConfig, sys.argv[1:])
        with prepared_run(config, planned_ppo) as run, running_trainer(*run) as trainer:
            trainer.fit()

    Raises:
        ValueError: Data, template or reward function cannot be used.
    """
    data = config.data
    worker = config.worker
    algorithm = config.algorithm
    trainer = config.trainer
    folder = Path(trainer.checkpoint_folder)
    with ExitStack() as stack:
        with phase("data"):
            cache = open_cache(stack)
            servers = stack.enter_context(
                RewardServers(config.reward_servers, pool.device, folder, config.num_devices)
            )
            reward = open_reward(stack, worker.scoring, folder, servers)
            check_scored_alone(algorithm.early_stop, reward, worker.reward.batch_size)
            media = media_options(data, worker.rollout)
            kind = kind_of(data, worker, trainer)
            readers = kind.readers(media, cache)
            check_teacher_tokens(config.distillation, readers.tokenizer)
            teachers = TeacherColumn.of(config.distillation)
            loaders = make_loaders(data, readers, folder, teachers)
            if loaders.train is not None:
                show_to_teachers(loaders.train.dataset, data, config.distillation, media, cache)
            origin = origin_of(config, planned_ppo(config).models)
            checkpoint = check_resume(config, origin, loaders.train)
        training_steps = make_plan(config, num_rows(loaders)).training_steps or 0

        shared = ModelRunOptions(
            pool.device, training_steps, media, cache, data.override_chat_template, data.seed,
            distillation=config.distillation,
        )  # fmt: skip
        options = ppo_options(
            shared,
            data,
            algorithm,
            config.models,
            has_old_pass=StepNeeds.of(config).old_pass,
            tools=readers.tools,
            in_lockstep=trainer.async_training.deterministic,
        )
        servers.start_own()
        workers, engines = kind.start(stack, pool, processes, options, config.num_devices)
        if config.reward_servers:
            with phase("reward servers"):
                servers.start_shared(workers.processes)
                servers.wait_until_started()
        tracker = stack.enter_context(open_tracker(config, training_steps, checkpoint))

        rollout_log = kind.rollout_log(readers)
        sampler = kind.sampler(engines, reward, readers, tracker, rollout_log)
        mini_batches = {role: section.global_batch_size for role, section in config.trained_roles.items()}
        group_filter = make_group_filter(algorithm, trainer.rejection_sample)
        quota = make_quota(data, trainer, mini_batches.values())
        prompts = endless(loaders.train)
        collector = RolloutCollector(
            sampler, prompts, group_filter, quota, algorithm, worker.reward,
            make_early_stop(algorithm, group_filter, data.seed),
        )  # fmt: skip
        at_once = worker.rollout.sequences_at_once(is_gpu(pool.device))
        sampling = make_schedule(engines, collector, trainer.async_training, training_steps, at_once)
        balancer = Balancer(config.dp_size, worker.rollout.n, mini_batches, worker.actor.share_prompt)
        prime = [PrimeRewards(workers, balancer, worker.prime.update)] if algorithm.use_prime else []
        stages = [*prime, *([servers.metrics] if servers.models else [])]
        validator = Validator(
            sampler, workers, loaders.val, worker, config.dp_size, trainer.val_generations_to_log,
            num_recorded=trainer.rollouts_to_keep, categories=Categories(data.category_keys, data.answer_key),
        )  # fmt: skip
        controllers = get_kl_controller(algorithm), get_entropy_controller(worker.actor)
        run_state = PPORunState(
            trainer, training_steps, *controllers, workers, loaders.train, sampling, origin
        )
        yield RayPPOTrainer(
            config, workers, sampling, balancer, stages, validator, run_state, rollout_log, tracker,
            open_served_teachers(config.distillation, servers),
        )  # fmt: skip
        write_timeline(trainer)


@contextmanager
def running_sft(
    config: SFTConfig, pool: ResourcePool, processes: WorkerProcesses | None = None
) -> Iterator[SFTTrainer]:
    """Start the workers of a fine-tuning run and yield its trainer, as `running_trainer` does."""
    data = config.data
    worker = config.worker
    trainer = config.trainer
    folder = Path(trainer.checkpoint_folder)
    with ExitStack() as stack:
        with phase("data"):
            cache = open_cache(stack)
            media = media_options(data, data)
            readers = load_readers(worker.actor.model, data.override_chat_template, media, cache)
            check_teacher_tokens(config.distillation, readers.tokenizer)
            teachers = TeacherColumn.of(config.distillation)
            loaders = make_sft_loaders(data, worker.actor.global_batch_size, readers, folder, teachers)
            origin = origin_of(config, planned_sft(config).models)
            checkpoint = check_resume(config, origin, loaders.train)
        training_steps = make_sft_plan(config, num_rows(loaders)).training_steps or 0

        options = ModelRunOptions(
            pool.device, training_steps, media, cache, data.override_chat_template, data.seed,
            distillation=config.distillation,
        )  # fmt: skip
        workers = start_workers(stack, pool, processes, SFTWorker, worker, options, trainer.worker_timeout_s)
        tracker = stack.enter_context(open_tracker(config, training_steps, checkpoint))
        run_state = RunState(trainer, training_steps, workers, loaders.train, origin)
        batches = endless(loaders.train)
        yield SFTTrainer(trainer, workers, batches, loaders.val, config.dp_size, run_state, tracker)
        write_timeline(trainer)


def kind_of(data: DataConfig, worker: WorkerConfig, trainer: TrainerConfig) -> RunKind:
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


def open_served_teachers(distillation: DistillationConfig, servers: RewardServers) -> ServedTeachers | None:
    """Return None unless a teacher runs behind a server."""
    if not distillation.served:
        return None
    from verl.trainer.served_teachers import TeacherModel  # noqa: PLC0415 (needs `openai`)

    numbers = {name: number for number, name in enumerate(distillation.teachers)}
    teachers = {
        numbers[name]: TeacherModel(name=name, **endpoint_arguments(servers.specs[str(teacher.server)]))
        for name, teacher in distillation.served.items()
    }
    return ServedTeachers(teachers, distillation.distillation_loss)


def num_rows(loaders: Loaders) -> int:
    return len(loaders.train.dataset) if loaders.train else 0


def ppo_options(
    shared: ModelRunOptions,
    data: DataConfig,
    algorithm: AlgorithmConfig,
    models: Collection[str],
    *,
    has_old_pass: bool,
    tools: Sequence[Mapping[str, Any]],  # schemas
    in_lockstep: bool = False,
) -> RunOptions:
    """Collect the options outside `worker` that the workers read; `models` are the run's roles."""
    correction = algorithm.rollout_correction
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
    run = Run(
        project_name=trainer.project_name,
        experiment_name=trainer.experiment_name,
        directory=folder,
        config=dataclasses.asdict(config),
        total_steps=training_steps,
        is_resumed=checkpoint is not None and checkpoint.resolve().parent == folder.resolve(),
        console=trainer.console,
    )
    return Tracker(trainer.logger, run)


def endless(loader: PromptLoader | None) -> Iterator[DataProto]:
    """Yield the batches of one epoch after another."""
    assert loader is not None, "only a run that only validates has no training rows"
    while True:
        yield from loader


def write_timeline(trainer: RunConfig) -> None:
    if trainer.ray_timeline is not None:
        ray.timeline(trainer.ray_timeline)
