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
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

from verl.api import restored_process
from verl.single_controller.ray.cluster import connect
from verl.single_controller.ray.environment import rank_environments
from verl.single_controller.ray.processes import WorkerProcess, WorkerProcesses
from verl.single_controller.ray.resource_pool import ResourcePool, actor_resources

CPUS = 8  # of the cluster, on any machine
MOST_IDLE = 3  # processes that wait for a run; each holds its packages in memory
STARTERS = ("verl.trainer.prepare", "verl.single_controller.ray.worker_group")


class WarmProcess(WorkerProcess):
    """The process of a rank that hosts one worker after another."""

    def set_up(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)

    def reset(self) -> None:
        """End what a closed worker left: its engine and process groups."""
        worker, self._worker = self._worker, None
        engine = getattr(worker, "engine", None)
        if engine is not None:
            engine.close()
        del worker, engine
        if "vllm.distributed.parallel_state" in sys.modules:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        elif dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


class Handle:
    """The handle of a warm process. Told to terminate, the process makes room for the next worker."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.reset = actor, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor, name)

    @property
    def __ray_terminate__(self) -> "Handle":
        return self

    def remote(self) -> Any:
        self.reset = self.actor.reset.remote()
        return self.reset


class Idle(NamedTuple):
    """Processes between two runs."""

    kind: tuple[Any, ...]
    group: PlacementGroup
    actors: list[Any]

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self.group)


class WarmProcesses(WorkerProcesses):
    """The processes of an earlier run of the same size and environment, or new ones."""

    idle: ClassVar[list[Idle]] = []

    def __init__(
        self, pool: ResourcePool, env: Mapping[str, str], warm_up: Callable[[], None] | None = None
    ) -> None:
        self.pool, self.handles = pool, []
        self.kind = (pool.nnodes, pool.processes_per_node, pool.neighbors, tuple(sorted(env.items())))
        found = next((each for each in self.idle if each.kind == self.kind), None)
        if found is None:
            self._make_room(pool.world_size)
            pool.acquire()
        else:
            self.idle.remove(found)
            pool.group = found.group
        slots = pool.slots()
        environments = rank_environments(pool, slots)
        if found is None:
            actor_class = ray.remote(max_restarts=0)(WarmProcess)
            for slot, environment in zip(slots, environments, strict=True):
                options = actor_class.options(
                    **actor_resources(pool.per_process()),
                    scheduling_strategy=pool.bundle(slot.bundle),
                    runtime_env={"env_vars": {**environment, **env}},
                )
                self.handles.append(Handle(options.remote()))
        else:
            self.handles = [Handle(actor) for actor in found.actors]
        for handle, environment in zip(self.handles, environments, strict=True):
            handle.set_up.remote(environment)  # another port for each run
            if warm_up is not None:
                handle.warm_up.remote(warm_up)

    def kill(self) -> None:
        """Keep the processes if each of them ended its worker; else kill them."""
        handles, self.handles = self.handles, []
        if not handles or not ray.is_initialized():
            return
        group, self.pool.group = self.pool.group, None
        assert group is not None, "acquired"
        free = Idle(self.kind, group, [handle.actor for handle in handles])
        try:
            if None in [handle.reset for handle in handles]:
                raise RayError("a failed run")
            ray.get([handle.reset for handle in handles])
        except RayError:
            free.end()
            return
        self._make_room(len(handles))
        self.idle.append(free)

    def _make_room(self, count: int) -> None:
        while self.idle and sum(len(each.actors) for each in self.idle) + count > MOST_IDLE:
            self.idle.pop(0).end()


@contextmanager
def warm_processes(cpus: int = CPUS) -> Iterator[None]:
    """Have the runs of the block use one cluster, and the processes of runs before them."""
    with ExitStack() as stack:
        for module in STARTERS:
            stack.enter_context(patch(f"{module}.WorkerProcesses", WarmProcesses))
        if connect(num_cpus=cpus):
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
