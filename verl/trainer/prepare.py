# SPDX-License-Identifier: Apache-2.0
"""Prepare a run: join the cluster, start processes, and check everything that needs no device.

Starting is slow because of imports: five seconds in the controller, and as much in each worker. So Ray starts
first, while a thread imports the rest of the controller, and the processes of the workers import theirs while
the controller checks models and opens data.
"""

import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import ray

from verl.config.trainer import RunTree
from verl.distributed.gpus import list_gpus
from verl.logger.console.start_up import phase
from verl.planning.auto_switches import recorded_options
from verl.planning.machine import Machine, find_machine
from verl.planning.report import Describe, problems_of, resolve_auto
from verl.single_controller.ray.cluster import connect
from verl.single_controller.ray.processes import WorkerProcesses
from verl.single_controller.ray.resource_pool import (
    ClusterError,
    ResourcePool,
    alive_nodes,
    all_resources,
    run_on_node,
)
from verl.trainer.run.stopping import hangups_for_us_only
from verl.utils.imports import collection_paused, importing
from verl.utils.rank_logger import get_logger

# Environment of the workers; the user's own values win. Errors reach the controller by themselves.
WORKER_ENV = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}

# Imported while Ray starts.
DEVICE, CHECKS = "verl.distributed.device", "verl.trainer.model_checks"
EXTENSIONS, SETUP = "verl.trainer.extensions.checks", "verl.trainer.setup"

SAMPLING = "trainer.n_gpus_for_rollout"
RETRY_S = 1.0  # between looks for missing machines

C = TypeVar("C", bound=RunTree)
T = TypeVar("T")
WarmUp = Callable[[str], None]  # run by each process first, with the device

logger = get_logger(__name__)


class PreparedRun(NamedTuple, Generic[C]):
    """A run that was checked, on the devices that were found."""

    config: C  # with numbers instead of `auto`
    pool: ResourcePool
    processes: WorkerProcesses | None = None  # of the pool; None starts new ones


def prepare_run(
    config: C,
    describe: Describe[C],
    stack: ExitStack,
    wait_s: float = 0.0,
    check: Callable[[], None] | None = None,
    warm_up: WarmUp | None = None,
) -> PreparedRun[C]:
    """Join the cluster, check the run, and start a process on each device; the stack ends all of it.

    Args:
        describe: `planned_ppo` or `planned_sft`.
        wait_s: Seconds to wait for a cluster that is too small or unreachable.
        check: Called after the checks of the models; raises if anything else is wrong with the run.
        warm_up: A function of a module that imports what the workers need.
    """
    with phase("Ray and libraries"):
        with collection_paused(), importing(DEVICE, CHECKS, EXTENSIONS, SETUP) as wait_for:
            is_own = connect_to_ray(wait_s, stack)
            wait_for(DEVICE)
            device = importlib.import_module(DEVICE).resolve_device(config.trainer.device, all_resources())
            config, pool = find_devices(config, device, wait_s)
            # Devices of a cluster that others use are not taken before all checks.
            processes = start_processes(pool, warm_up, stack) if is_own else None
        checks = importlib.import_module(CHECKS)
    with phase("model files"):
        # First: a model family says how to read a model.
        importlib.import_module(EXTENSIONS).check_extensions(config)
        run = describe(config)
        checks.check_quantized_engine(run, device)
        checks.export_checkpoints(each.model for each in (*run.models, *run.servers))
        checks.check_models(run)
    if check is not None:
        with phase("rewards of samples"):
            check()
    processes = processes or start_processes(pool, warm_up, stack)
    # Last: with `trainer.elastic` there may be fewer devices than requested, and sizes depend on them.
    before = partial(recorded_options, config.trainer)
    config = resolve_auto(config, describe, device, find_machine_of_run, before)
    return PreparedRun(config, pool, processes)


def connect_to_ray(wait_s: float, stack: ExitStack) -> bool:
    """Connect to Ray, until the stack ends; return whether that started a cluster, which no other run uses.

    Raises:
        ClusterError: The cluster is unreachable for more than `wait_s` seconds.
    """
    if ray.is_initialized():
        return False
    with hangups_for_us_only():
        is_new = _retry_until(time.monotonic() + wait_s, connect)
    stack.callback(ray.shutdown)  # not if the caller had connected before
    return is_new


def start_processes(pool: ResourcePool, warm_up: WarmUp | None, stack: ExitStack) -> WorkerProcesses:
    """Start the processes of a run, which end with the stack."""
    env = {name: os.environ.get(name, value) for name, value in WORKER_ENV.items()}
    processes = WorkerProcesses(pool, env, partial(warm_up, pool.device) if warm_up else None)
    stack.callback(processes.kill)
    return processes


def find_devices(config: C, device: str, wait_s: float) -> tuple[C, ResourcePool]:
    """Find the devices of a run; with `trainer.elastic` the config may change to fewer.

    Raises:
        ClusterError: The cluster is too small for more than `wait_s` seconds.
    """
    pool = _pool_of(config, device)

    def check() -> None:
        pool.check()
        check_all_fit(config, pool.capacities())

    try:
        _retry_until(time.monotonic() + wait_s, check)
    except ClusterError:
        smaller = largest_run(config, pool.capacities()) if config.trainer.elastic else None
        if smaller is None:
            raise
        options = smaller.trainer
        logger.warning(
            "fewer devices than requested: nodes=%d of=%d on_each=%d of=%d",
            options.nnodes, config.trainer.nnodes, options.n_gpus_per_node, config.trainer.n_gpus_per_node,
        )  # fmt: skip
        return smaller, _pool_of(smaller, device)
    return config, pool


def check_all_fit(config: RunTree, capacities: Sequence[int]) -> None:
    """Raise a ClusterError unless devices are left in addition to those for training."""
    trainer, found = config.trainer, sum(capacities)
    if config.num_devices > found:
        uses = {
            "train": trainer.world_size,
            "sample (`trainer.n_gpus_for_rollout`)": trainer.num_processes - trainer.world_size,
            "serve models of the reward (`reward_servers.NAME.n_gpus`)": config.num_serving,
        }
        named = " and ".join(f"{count} to {use}" for use, count in uses.items() if count)
        raise ClusterError(
            f"the run needs {config.num_devices} devices, {named}, and the cluster has {found}: lower one of"
            " them, or join nodes"
        )


def find_machine_of_run(device: str) -> Machine:
    """Describe this machine, or for CUDA without a GPU here the first of the cluster with GPUs."""
    nodes = [node for node in alive_nodes() if node["Resources"].get("GPU", 0)]
    if device == "cpu" or list_gpus() or not nodes:
        return find_machine(device)
    return ray.get(run_on_node(nodes[0]["NodeID"], find_machine, device))


def largest_run(config: C, capacities: Sequence[int]) -> C | None:
    """Return the same run on as many devices as there are and as its batch sizes allow; None if none do.

    `capacities` are the numbers of processes that the nodes of the cluster can hold.
    """
    # The loss does not depend on the split of a batch over ranks: a smaller run computes the same numbers.
    for nnodes, per_node in _sizes(config, capacities):
        smaller = replace(config, trainer=replace(config.trainer, nnodes=nnodes, n_gpus_per_node=per_node))
        if not problems_of(smaller):
            return smaller
    return None


def _sizes(config: RunTree, capacities: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield nodes and processes per node that fit, most processes first, then fewest nodes."""
    trainer, ranked = config.trainer, sorted(capacities, reverse=True)
    left = sum(ranked) - (config.num_devices - trainer.world_size)  # by processes that sample or serve
    sizes = [
        (nnodes, per_node)
        for nnodes in range(1, min(trainer.nnodes, len(ranked)) + 1)
        for per_node in range(1, min(trainer.n_gpus_per_node, ranked[nnodes - 1]) + 1)
        if nnodes * per_node <= left
    ]
    yield from sorted(sizes, key=lambda size: (-size[0] * size[1], size[0]))


def engine_pool(num_devices: int, size: int, device: str, option: str = SAMPLING) -> ResourcePool:
    """Describe `size` devices of the run's, for an engine in processes of its own, on any node."""
    return ResourcePool(1, size, device, neighbors=num_devices - size, options=(option,))


def _pool_of(config: RunTree, device: str) -> ResourcePool:
    trainer = config.trainer
    others = config.num_devices - trainer.world_size
    return ResourcePool(trainer.nnodes, trainer.n_gpus_per_node, device, neighbors=others)


def _retry_until(deadline: float, action: Callable[[], T]) -> T:
    while True:
        try:
            return action()
        except ClusterError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)
