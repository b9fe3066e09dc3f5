# SPDX-License-Identifier: Apache-2.0
"""Commands run inside the test process, on one Ray cluster, by processes that host one worker after another.

A command spends most of its time on imports, in the controller and in each worker. Here they happen once.
What a run leaves in a worker's process, its engine and process groups, ends with the run.
"""

import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import ray
import torch.distributed as dist
from ray.exceptions import RayError

from verl.api import restored_process
from verl.single_controller.ray.cluster import connect
from verl.single_controller.ray.processes import WorkerProcess, WorkerProcesses, rank_environments
from verl.single_controller.ray.resource_pool import ResourcePool

CPUS = 12  # of the cluster, on any machine
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MOST_IDLE = 3  # processes that wait for a run; each holds its packages in memory
STARTERS = ("verl.trainer.prepare", "verl.single_controller.ray.worker_group")


class WarmProcess(WorkerProcess):
    """The process of a rank that hosts one worker after another."""

    def set_up(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)

    def reset(self) -> None:
        """End what a closed worker left: its engine and process groups."""
        worker, self._worker = self._worker, None
        close = getattr(getattr(worker, "engine", None), "close", None)
        if close is not None:  # an engine of diffusion has nothing to end
            close()
        del worker, close
        if "vllm.distributed.parallel_state" in sys.modules:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        elif dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


class Handle:
    """The handle of a warm process. Told to terminate, the process makes room for the next worker."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.reset, self.hosts = actor, None, False

    def __getattr__(self, name: str) -> Any:
        self.hosts |= name == "host"
        return getattr(self.actor, name)

    @property
    def __ray_terminate__(self) -> "Handle":
        return self

    def remote(self) -> Any:
        self.reset = self.actor.reset.remote()
        return self.reset


class Idle(NamedTuple):
    """A process between two runs, with its resources."""

    settings: tuple[tuple[str, str], ...]  # environment that it was started with
    rank: int  # the same in every run: torch caches shards by the ranks of a mesh, without the own one
    process: WorkerProcesses  # of one rank


class WarmProcesses(WorkerProcesses):
    """The processes of earlier runs, and new ones where they do not suffice; all on this machine.

    Each has one thread, as tests share the cores.
    """

    idle: ClassVar[list[Idle]] = []

    def __init__(
        self, pool: ResourcePool, env: Mapping[str, str], warm_up: Callable[[], None] | None = None
    ) -> None:
        self.pool, self.handles = pool, []
        self.settings = tuple(sorted(env.items()))
        self.taken = [self._take(pool, env, rank) for rank in range(pool.world_size)]
        pool.group = self.taken[0].process.pool.group
        self.handles = [Handle(each.process.handles[0]) for each in self.taken]
        for handle, environment in zip(self.handles, rank_environments(pool, pool.slots()), strict=True):
            handle.set_up.remote(environment | ONE_THREAD)
            if warm_up is not None:
                handle.warm_up.remote(warm_up)

    def kill(self) -> None:
        """Keep the processes if each of them ended its worker or never had one; else kill them."""
        handles, self.handles = self.handles, []
        self.pool.group = None
        if not handles or not ray.is_initialized():
            return
        try:
            ended = [handle.reset for handle in handles if handle.hosts]
            if None in ended:
                raise RayError("a failed run")
            ray.get(ended)
        except RayError:
            for each in self.taken:
                each.process.kill()
            return
        self.idle.extend(self.taken)
        while len(self.idle) > MOST_IDLE:
            self.idle.pop(0).process.kill()

    def _take(self, pool: ResourcePool, env: Mapping[str, str], rank: int) -> Idle:
        wanted = (self.settings, rank)
        found = next((each for each in self.idle if (each.settings, each.rank) == wanted), None)
        if found is not None:
            self.idle.remove(found)
            return found
        with patch(f"{WorkerProcesses.__module__}.WorkerProcess", WarmProcess):
            alone = WorkerProcesses(ResourcePool(1, 1, pool.device), {**env, **ONE_THREAD})
        return Idle(self.settings, rank, alone)


@contextmanager
def warm_processes() -> Iterator[None]:
    """Have the runs of the block use one cluster, and the processes of runs before them."""
    with ExitStack() as stack:
        for module in STARTERS:
            stack.enter_context(patch(f"{module}.WorkerProcesses", WarmProcesses))
        if connect(num_cpus=CPUS):
            WarmProcesses.idle.clear()  # of a cluster that has ended
        yield


def run_warm(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> subprocess.CompletedProcess:
    """Call the main function of a command that trains; return its output and exit status."""
    out, error = io.StringIO(), io.StringIO()
    with restored_process(), warm_processes(), redirect_stdout(out), redirect_stderr(error):
        status = main(list(arguments))
    return subprocess.CompletedProcess(list(arguments), status, out.getvalue(), error.getvalue())


def cool_down() -> None:
    """End the processes and the cluster, for tests that need another one or none."""
    WarmProcesses.idle.clear()
    ray.shutdown()
