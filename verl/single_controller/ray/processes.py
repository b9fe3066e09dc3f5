# SPDX-License-Identifier: Apache-2.0
"""Processes of the ranks of a resource pool, and their environment: ranks, rendezvous, threads.

They may start before it is known what they will run: a worker needs seconds to import its packages, and does
so while the controller still imports its own and opens the data. Imports neither torch nor the workers.
"""

import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util import get_node_ip_address

from verl.distributed.backends import hiding_variables, one_device_each, visible_devices
from verl.single_controller.ray.resource_pool import (
    ResourcePool,
    Slot,
    actor_resources,
    alive_nodes,
    run_on_node,
)
from verl.utils.cuda_builds import child_environment
from verl.utils.imports import collection_paused

# Below Linux's ports for outgoing connections and above those of Ray's workers, so that a port is unlikely to
# be taken between the choice and its use.
PORTS = range(20000, 32000)

# Entries of oneDNN's and torch's caches by matrix shape, unless set by the user. Packed batches rarely repeat
# a shape: with the default 1024 entries a tiny model's process grows by 0.7 GB in 130 steps and is no faster.
CPU_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}

# Packed batches take blocks of other sizes in every step: fixed segments of the CUDA allocator fragment, and
# reserved memory grows beyond what is used. torch has a newer name, `PYTORCH_ALLOC_CONF`; vLLM 0.26 reads
# only this one, to switch it off around the memory that it puts to sleep.
ALLOCATOR, NEW_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
GROWING_SEGMENTS = "expandable_segments:True"


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


def rank_environments(pool: ResourcePool, slots: list[Slot]) -> list[dict[str, str]]:
    on_one_machine = len({slot.node_ip for slot in slots}) == 1
    is_here = slots[0].node_ip == get_node_ip_address()
    port = find_free_port() if is_here else ray.get(run_on_node(slots[0].node_id, find_free_port))
    processes = Counter(slot.node_ip for slot in slots)
    threads = {ip: max(1, cores_on(ip) // (count + pool.neighbors)) for ip, count in processes.items()}
    address = "127.0.0.1" if on_one_machine else slots[0].node_ip
    common = {"WORLD_SIZE": str(pool.world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if on_one_machine:
        common["GLOO_SOCKET_IFNAME"] = "lo"
    if pool.device == "cpu":
        common |= hiding_variables()
        common |= child_environment()
        common |= {name: os.environ.get(name, entries) for name, entries in CPU_CACHES.items()}
    else:
        common |= one_device_each()
        common |= allocator_settings(os.environ)
    return [
        common
        | {
            "RANK": str(rank),
            # Ray shows each process one GPU, which is then its device 0.
            "LOCAL_RANK": "0" if pool.device != "cpu" else str(slot.rank_on_node),
            "OMP_NUM_THREADS": str(threads[slot.node_ip]),
        }
        for rank, slot in enumerate(slots)
    ]


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the user's setting of torch's CUDA allocator, or ours, under the name that all read."""
    given = environment.get(NEW_ALLOCATOR) or environment.get(ALLOCATOR)  # as torch prefers
    return {ALLOCATOR: given or GROWING_SEGMENTS}


def cores_on(node_ip: str) -> int:
    """Return the CPU cores of a node: those given to Ray, and on this machine no more than it has."""
    nodes = [node for node in alive_nodes() if node["NodeManagerAddress"] == node_ip]
    cores = int(sum(node["Resources"].get("CPU", 0) for node in nodes))
    return min(cores, len(os.sched_getaffinity(0))) if node_ip == get_node_ip_address() else cores


def find_free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, 200):
        with suppress(OSError), socket.socket() as attempt:
            attempt.bind(("", port))
            return port
    raise RuntimeError(
        f"no free TCP port found from {PORTS.start} to {PORTS.stop - 1}: end other runs on this machine"
    )
