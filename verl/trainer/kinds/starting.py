# SPDX-License-Identifier: Apache-2.0
"""Starts the processes that train, and engines in separate processes."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from verl.config.trainer import TrainerConfig
from verl.config.worker import WorkerConfig
from verl.logger.console.start_up import phase
from verl.single_controller.ray.processes import WorkerProcesses
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.single_controller.ray.worker_group import Pending, RayWorkerGroup
from verl.single_controller.worker import Worker
from verl.trainer.prepare import start_processes
from verl.trainer.rollouts.engines import Engines, OwnEngines, SharedEngines
from verl.trainer.rollouts.roster import Roster
from verl.trainer.run.cluster_join import engine_pool
from verl.workers.fsdp_worker import FSDPWorker
from verl.workers.rollout.interface import EngineAdapter
from verl.workers.rollout_worker import RolloutWorker
from verl.workers.run_options import ModelRunOptions, RunOptions
from verl.workers.training_worker import TrainingWorker
from verl.workers.warm_up import import_rollout_worker


def start_engines(
    stack: ExitStack,
    worker: WorkerConfig,
    trainer: TrainerConfig,
    pool: ResourcePool,
    processes: WorkerProcesses | None,
    options: RunOptions,
    num_devices: int,  # of the run
) -> tuple[RayWorkerGroup, Engines]:
    """Start the processes that train, and separate sampling processes if there are any."""
    timeout_s, size = trainer.worker_timeout_s, worker.rollout.tensor_parallel_size
    if worker.hybrid_engine:
        workers = start_workers(stack, pool, processes, FSDPWorker, worker, options, timeout_s)
        return workers, SharedEngines(workers, worker)
    warm_up = partial(import_rollout_worker, worker.rollout.name)

    def new_processes() -> WorkerProcesses:
        return start_processes(engine_pool(num_devices, size, pool.device), warm_up, stack)

    def new_group(number: int, its: WorkerProcesses) -> RayWorkerGroup:
        group = RayWorkerGroup(
            its.pool, RolloutWorker, worker, options, number, timeout_s=timeout_s, processes=its
        )
        return stack.enter_context(group)

    # all at once: imports take seconds
    started = [new_processes() for _ in range(trainer.n_gpus_for_rollout // size)]
    groups = [new_group(number, its) for number, its in enumerate(started)]
    beginning: list[Pending] = []
    adapter: EngineAdapter | None = None
    if not worker.actor.model.lora.is_used:  # else the engines may serve the adapters of the loaded model
        beginning = [group.start("init_engine", None) for group in groups]
    workers = start_workers(stack, pool, processes, TrainingWorker, worker, options, timeout_s)
    with phase("rollout engines"):
        if not beginning:
            adapter = workers.engine_adapter()[0]
            beginning = [group.start("init_engine", adapter) for group in groups]
        for pending in beginning:
            pending.result()

    def start_another(number: int) -> RayWorkerGroup:
        group = new_group(number, new_processes())
        group.init_engine(adapter)
        return group

    roster = Roster(
        groups,
        start_another,
        engine_pool(num_devices, size, pool.device).num_free,
        num_places=trainer.max_gpus_for_rollout // size,
        max_restarts=trainer.async_training.max_engine_restarts,
    )
    stack.callback(roster.close)
    return workers, OwnEngines(workers, roster)


def start_workers(
    stack: ExitStack,
    pool: ResourcePool,
    processes: WorkerProcesses | None,
    kind: type[Worker],
    worker: Any,
    options: ModelRunOptions,
    timeout_s: float | None,
) -> RayWorkerGroup:
    """Start a worker on each device and have them load their models."""
    with phase("workers"):
        group = RayWorkerGroup(pool, kind, worker, options, timeout_s=timeout_s, processes=processes)
        workers = stack.enter_context(group)
    with phase("models and engine" if kind is FSDPWorker else "models"):
        workers.init_model()
    return workers
