# SPDX-License-Identifier: Apache-2.0
"""Starts the processes that train, and engines in separate processes."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.config.trainer import TrainerConfig
from verl.config.worker import WorkerConfig
from verl.logger.console.start_up import phase
from verl.single_controller.ray.processes import WorkerProcesses
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.single_controller.ray.worker_group import Pending, RayWorkerGroup
from verl.single_controller.worker import Worker
from verl.trainer.prepare import PreparedRun, engine_pool, start_processes
from verl.trainer.rollouts.engine_registry import EngineRegistry
from verl.trainer.rollouts.engines import Engines, OwnEngines, SharedEngines
from verl.workers.fsdp_worker import FSDPWorker
from verl.workers.rollout.interface import EngineAdapter
from verl.workers.rollout_worker import RolloutWorker
from verl.workers.run_options import ModelRunOptions, RunOptions
from verl.workers.training_worker import TrainingWorker
from verl.workers.warm_up import import_worker


def start_workers(
    run: PreparedRun[Any], stack: ExitStack, kind: type[Worker], options: ModelRunOptions
) -> RayWorkerGroup:
    """Start a worker on each device and have them load their models."""
    worker, timeout_s = run.config.worker, run.config.trainer.worker_timeout_s
    with phase("workers"):
        group = RayWorkerGroup(run.pool, kind, worker, options, timeout_s=timeout_s, processes=run.processes)
        workers = stack.enter_context(group)
    with phase("models and engine" if kind is FSDPWorker else "models"):
        workers.init_model()
    return workers


def start_workers_and_engines(
    run: PreparedRun[Any], stack: ExitStack, kind: type[Worker], options: RunOptions
) -> tuple[RayWorkerGroup, Engines]:
    """Start the processes that train, and separate sampling processes; without any, `kind` does both."""
    worker: WorkerConfig = run.config.worker
    trainer: TrainerConfig = run.config.trainer
    if worker.hybrid_engine:
        workers = start_workers(run, stack, kind, options)
        return workers, SharedEngines(workers, worker)

    size = worker.rollout.tensor_parallel_size
    own_pool = partial(engine_pool, run.config.num_devices, size, run.pool.device)
    starter = EngineStarter(stack, own_pool, worker, options, trainer.worker_timeout_s)
    # All at once: imports take seconds.
    waiting = [starter.new_processes() for _ in range(trainer.n_gpus_for_rollout // size)]
    groups = [starter.new_group(index, its) for index, its in enumerate(waiting)]
    started: list[Pending] = []
    adapter: EngineAdapter | None = None
    if not worker.actor.model.lora.is_used:  # else the engines may serve the adapters of the loaded model
        started = [group.start("init_engine", None) for group in groups]
    workers = start_workers(run, stack, TrainingWorker, options)
    with phase("rollout engines"):
        if not started:
            adapter = workers.engine_adapter()[0]
            started = [group.start("init_engine", adapter) for group in groups]
        for pending in started:
            pending.result()
    registry = EngineRegistry(
        groups,
        partial(starter.start_another, adapter),
        own_pool().num_free,
        num_slots=trainer.max_gpus_for_rollout // size,
        max_restarts=trainer.async_training.max_engine_restarts,
    )
    stack.callback(registry.close)
    return workers, OwnEngines(workers, registry)


@dataclass(frozen=True)
class EngineStarter:
    """Starts rollout engines in separate processes, which end with the stack."""

    stack: ExitStack
    pool: Callable[[], ResourcePool]  # the devices of one more engine
    worker: WorkerConfig
    options: RunOptions
    timeout_s: float | None

    def new_processes(self) -> WorkerProcesses:
        warm_up = partial(import_worker, "rollout_worker", self.worker.rollout.name)
        return start_processes(self.pool(), warm_up, self.stack)

    def new_group(self, index: int, processes: WorkerProcesses) -> RayWorkerGroup:
        group = RayWorkerGroup(
            processes.pool, RolloutWorker, self.worker, self.options, index,
            timeout_s=self.timeout_s, processes=processes,
        )  # fmt: skip
        return self.stack.enter_context(group)

    def start_another(self, adapter: EngineAdapter | None, index: int) -> RayWorkerGroup:
        """Start an engine in the course of the run, and wait for it."""
        group = self.new_group(index, self.new_processes())
        group.init_engine(adapter)
        return group
