# SPDX-License-Identifier: Apache-2.0
"""Processes of the ranks of a resource pool, which may start before it is known what they will run.

A worker needs seconds to import its packages. Processes that start first do so while the controller still
imports its own and opens the data. Imports neither torch nor the workers.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray

from verl.distributed.backends import visible_devices
from verl.single_controller.ray.environment import rank_environments
from verl.single_controller.ray.resource_pool import ResourcePool, actor_resources
from verl.utils.imports import collection_paused


class WorkerProcess:
    """The actor of one rank: imports packages, then hosts a `Worker` and passes calls on to it."""

    _worker: Any = None

    def __repr__(self) -> str:
        return f"rank {os.environ['RANK']}"  # starts its lines in the controller's output

    def warm_up(self, imports: Callable[[], None]) -> None:
        """Import packages ahead; if that fails, so will `host`."""
        with collection_paused(), suppress(Exception):
            imports()

    def visible_devices(self, kind: str) -> str:
        """Return the devices that the process sees, as its environment lists them."""
        return visible_devices(kind)

    def host(self, worker_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Build the worker and return its identity; its other methods come after this one."""
        self._worker = worker_class(*args, **kwargs)
        return self._worker.info()

    def axes(self) -> Any:
        return self._worker.axes()

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        return self._worker.execute(*args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from self._worker.stream(*args, **kwargs)

    def drain(self, *args: Any, **kwargs: Any) -> None:
        self._worker.drain(*args, **kwargs)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class WorkerProcesses:
    """Takes the resources of a pool and starts a process for each rank; `kill` frees them."""

    def __init__(
        self, pool: ResourcePool, env: Mapping[str, str], warm_up: Callable[[], None] | None = None
    ) -> None:
        """Return at once; the processes run `warm_up`, a function of a module, before anything else.

        `env` is set before a process imports anything.
        """
        self.pool = pool
        self.handles: list[Any] = []  # Ray's, by rank
        pool.acquire()
        try:
            actor_class = ray.remote(max_restarts=0)(WorkerProcess)
            slots = pool.slots()
            for slot, environment in zip(slots, rank_environments(pool, slots), strict=True):
                options = actor_class.options(
                    **actor_resources(pool.per_process()),
                    scheduling_strategy=pool.bundle(slot.bundle),
                    runtime_env={"env_vars": {**environment, **env}},
                )
                self.handles.append(options.remote())
                if warm_up is not None:
                    self.handles[-1].warm_up.remote(warm_up)
        except BaseException:
            self.kill()
            raise

    def visible_devices(self, first: int, count: int) -> list[str]:
        """Return the GPUs of `count` processes from a rank on."""
        handles = self.handles[first : first + count]
        return ray.get([handle.visible_devices.remote(self.pool.device) for handle in handles])

    def kill(self) -> None:
        """Kill the processes and release the pool; may be called twice."""
        handles, self.handles = self.handles, []
        if ray.is_initialized():
            for handle in handles:
                ray.kill(handle)
            self.pool.release()
