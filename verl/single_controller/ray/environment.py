# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a process group: ranks, rendezvous, threads."""

import os
import random
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import ray
from ray.util import get_node_ip_address

from verl.distributed.backends import hiding_variables, one_device_each
from verl.single_controller.ray.resource_pool import ResourcePool, Slot, alive_nodes, run_on_node
from verl.utils.cuda_builds import child_environment

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
