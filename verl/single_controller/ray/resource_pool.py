# SPDX-License-Identifier: Apache-2.0
"""The part of a Ray cluster that a run holds: the same number of processes on each of its nodes."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RESOURCE_OF_DEVICE = {"cuda": "GPU", "cpu": "CPU"}


class ClusterError(RuntimeError):
    """The cluster cannot be reached, is too small, or its resources are not free."""


class Slot(NamedTuple):
    """Where the process of one rank goes."""

    bundle: int  # of the placement group: one for each node
    node_id: str
    node_ip: str
    rank_on_node: int


@dataclass
class ResourcePool:
    """Holds `processes_per_node` devices on each of `nnodes` different nodes.

    Example::

        pool = ResourcePool(nnodes=2, processes_per_node=8, device="cuda")
        pool.acquire()
        pool.slots()  # 16 of them, in rank order
        pool.release()
    """

    nnodes: int
    processes_per_node: int
    device: str  # "cuda": one GPU and one CPU for each process; "cpu": one CPU
    timeout_s: float = 60.0  # for resources that exist to become free
    group: PlacementGroup | None = None

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.nnodes * self.processes_per_node

    def per_process(self) -> dict[str, float]:
        """Return what each process takes of its node."""
        return {"CPU": 1.0, RESOURCE_OF_DEVICE[self.device]: 1.0}

    def per_node(self) -> dict[str, float]:
        """Return what the processes of one node take of it."""
        return {name: amount * self.processes_per_node for name, amount in self.per_process().items()}

    def capacities(self) -> list[int]:
        """How many processes each node of the cluster can hold."""
        need = self.per_process()
        return [
            min(int(node["Resources"].get(name, 0) // need[name]) for name in need) for node in _alive_nodes()
        ]

    def check(self) -> None:
        """Compare the cluster with what is needed.

        Raises:
            ClusterError: Too few nodes, or too few GPUs or CPUs on them; names found, needed and the remedy.
        """
        if sum(capacity >= self.processes_per_node for capacity in self.capacities()) >= self.nnodes:
            return
        nodes, need = _alive_nodes(), self.per_node()
        found = "; ".join(
            f"{node['NodeManagerAddress']}: "
            + _amounts({name: node["Resources"].get(name, 0) for name in need})
            for node in nodes
        )
        remedy = "lower `trainer.n_gpus_per_node`"
        if self.nnodes > 1:
            remedy += " or `trainer.nnodes`, or join nodes with `ray start --address=<head node>:6379`"
        elif self.device == "cpu":
            remedy += ", or start Ray yourself with `ray start --head --num-cpus=N`"
        raise ClusterError(
            f"`trainer.nnodes` ({self.nnodes}) x `trainer.n_gpus_per_node` ({self.processes_per_node}) on"
            f" {self.device} needs {self.nnodes} nodes with {_amounts(need)} each,"
            f" found {len(nodes)} nodes ({found}): {remedy}"
        )

    def acquire(self) -> None:
        """Take the resources; waits until others free them, `timeout_s` at most.

        Raises:
            ClusterError: The cluster is too small, or others hold it.
        """
        self.check()
        self.group = placement_group([self.per_node()] * self.nnodes, strategy="STRICT_SPREAD")
        if not self.group.wait(self.timeout_s):
            self.release()
            free = {name: ray.available_resources().get(name, 0.0) for name in self.per_node()}
            raise ClusterError(
                f"`trainer.nnodes` ({self.nnodes}) x `trainer.n_gpus_per_node` ({self.processes_per_node}) on"
                f" {self.device} needs {self.nnodes} nodes with {_amounts(self.per_node())} each; the cluster"
                f" is large enough, but only {_amounts(free)} are free in all of it after"
                f" {self.timeout_s:g} seconds: end other runs on it (see `ray status`)"
            )

    def release(self) -> None:
        """Give the resources back; harmless when none are held."""
        group, self.group = self.group, None
        if group is not None:
            with suppress(RayError):  # the cluster is gone, and what was held with it
                remove_placement_group(group)

    def bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Return how an actor asks for a place on a node of the pool."""
        assert self.group is not None, "bundle() needs acquire() before"
        return PlacementGroupSchedulingStrategy(self.group, index)

    def slots(self) -> list[Slot]:
        """Return where each rank goes: node after node, the controller's first, then by address."""
        assert self.group is not None, "slots() needs acquire() before"
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        here = get_node_ip_address()
        order = sorted(
            nodes, key=lambda bundle: (addresses[nodes[bundle]] != here, addresses[nodes[bundle]], bundle)
        )
        return [
            Slot(bundle, nodes[bundle], addresses[nodes[bundle]], index)
            for bundle in order
            for index in range(self.processes_per_node)
        ]


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources[name]:g} {name}s" for name in sorted(resources, reverse=True))
