# SPDX-License-Identifier: Apache-2.0
"""Resources of a Ray cluster that a run holds: the same number of processes on each of its nodes."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray._private.state import available_resources_per_node  # documented for developers, exported nowhere
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.distributed.backends import BACKENDS, CPU_RESOURCE


class ClusterError(RuntimeError):
    """The cluster cannot be reached, is too small, or its resources are in use."""


class Slot(NamedTuple):
    """Placement of one rank."""

    bundle: int  # index in the placement group, one per node
    node_id: str
    node_ip: str
    rank_on_node: int


@dataclass
class ResourcePool:
    """Holds `processes_per_node` devices on each of `nnodes` nodes, from `acquire` to `release`."""

    nnodes: int
    processes_per_node: int
    device: str  # of `BACKENDS`; a GPU and a CPU per process, or a CPU
    timeout_s: float = 60.0  # wait for resources in use
    group: PlacementGroup | None = None
    neighbors: int = 0  # other processes of the run, which share the cores of a node
    options: tuple[str, ...] = ("trainer.nnodes", "trainer.n_gpus_per_node")  # that ask for them, for errors

    @property
    def world_size(self) -> int:
        return self.nnodes * self.processes_per_node

    def per_process(self) -> dict[str, float]:
        return {CPU_RESOURCE: 1.0, BACKENDS[self.device].resource: 1.0}

    def per_node(self) -> dict[str, float]:
        return {name: amount * self.processes_per_node for name, amount in self.per_process().items()}

    def capacities(self) -> list[int]:
        """Number of processes that fit on each node of the cluster."""
        return [_times(self.per_process(), node["Resources"]) for node in alive_nodes()]

    def num_free(self) -> int:
        """Return the number of pools that the free resources of the nodes suffice for."""
        fitting = [_times(self.per_node(), free) for free in available_resources_per_node().values()]
        number = sum(fitting) // self.nnodes
        while sum(min(each, number) for each in fitting) < number * self.nnodes:  # a node once in a pool
            number -= 1
        return number

    def check(self) -> None:
        """Raise a ClusterError with found, needed and remedy unless the cluster is large enough."""
        if sum(capacity >= self.processes_per_node for capacity in self.capacities()) >= self.nnodes:
            return
        nodes = alive_nodes()
        found = "; ".join(
            f"{node['NodeManagerAddress']}: {_amounts(node['Resources'], self.per_node())}" for node in nodes
        )
        remedy = f"lower `{self.options[-1]}`"
        if self.nnodes > 1:
            remedy += " or `trainer.nnodes`, or join nodes with `ray start --address=<head node>:6379`"
        elif self.device == "cpu":
            remedy += ", or start Ray yourself with `ray start --head --num-cpus=N`"
        raise ClusterError(f"{self._need()} each, found {len(nodes)} nodes ({found}): {remedy}")

    def acquire(self) -> None:
        """Take the resources; wait at most `timeout_s` for others to free them."""
        self.check()
        self.group = placement_group([self.per_node()] * self.nnodes, strategy="STRICT_SPREAD")
        if not self.group.wait(self.timeout_s):
            self.release()
            free = _amounts(ray.available_resources(), self.per_node())
            raise ClusterError(
                f"{self._need()} each; the cluster is large enough, but only {free} are free in all of it"
                f" after {self.timeout_s:g} seconds: end other runs on it (see `ray status`)"
            )

    def release(self) -> None:
        """Free the resources; does nothing if none are held."""
        group, self.group = self.group, None
        if group is not None:
            with suppress(RayError):  # the cluster is gone, and its resources with it
                remove_placement_group(group)

    def bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        assert self.group is not None, "call acquire() before bundle()"
        return PlacementGroupSchedulingStrategy(self.group, index)

    def slots(self) -> list[Slot]:
        """Return the placement of each rank: node after node, this one first, then by address."""
        assert self.group is not None, "call acquire() before slots()"
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        here = get_node_ip_address()
        order = sorted((addresses[node] != here, addresses[node], bundle) for bundle, node in nodes.items())
        return [
            Slot(bundle, nodes[bundle], address, index)
            for _, address, bundle in order
            for index in range(self.processes_per_node)
        ]

    def _need(self) -> str:
        need = self.per_node()
        sizes = zip(self.options, (self.nnodes, self.processes_per_node)[-len(self.options) :], strict=True)
        asked = " x ".join(f"`{option}` ({size})" for option, size in sizes)
        return f"{asked} on {self.device} needs {self.nnodes} nodes with {_amounts(need, need)}"


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def all_resources() -> dict[str, float]:
    """Return the resources of the cluster, whoever uses them."""
    return dict(sum((Counter(node["Resources"]) for node in alive_nodes()), Counter()))


def actor_resources(amounts: Mapping[str, float]) -> dict[str, Any]:
    """Return amounts such as {"CPU": 1, "NPU": 1} as options of a Ray actor."""
    named = {CPU_RESOURCE: "num_cpus", "GPU": "num_gpus"}
    custom = {name: amount for name, amount in amounts.items() if name not in named}
    return {option: amounts.get(name, 0) for name, option in named.items()} | {"resources": custom}


def run_on_node(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Start a function on a node; return Ray's reference to its result."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0)(function).options(scheduling_strategy=there).remote(*args)


def _times(need: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """Return how often the resources suffice for the needed ones."""
    return min(int(resources.get(name, 0) // amount) for name, amount in need.items())


def _amounts(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}s" for name in sorted(names, reverse=True))
