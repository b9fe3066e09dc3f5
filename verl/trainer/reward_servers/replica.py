# SPDX-License-Identifier: Apache-2.0
"""One replica of a served model: a Ray actor with vLLM's server, on separate devices or shared ones."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.distributed.backends import one_device_each
from verl.single_controller.ray.processes import CPU_CACHES, cores_on, find_free_port
from verl.single_controller.ray.resource_pool import ResourcePool, actor_resources
from verl.utils.cuda_builds import child_environment
from verl.workers.rollout.model_server import ModelServer, ServerLaunch

LOCAL = "127.0.0.1"
CLOSE_S = 10.0  # for a server to end
CALLS = 4  # at once: one waits for the end of the server


class ReplicaActor(ModelServer):
    """A `ModelServer` as an actor of Ray, on its node."""

    def __repr__(self) -> str:
        return f"reward server {self.launch.name}"  # starts its lines in the controller's output

    def start_for(self, controller_ip: str) -> str:
        """Start the server, which others than the controller's node can only reach if it is on another."""
        here = get_node_ip_address()
        return self.start(LOCAL if here == controller_ip else here, find_free_port())


@dataclass(frozen=True)
class OwnDevices:
    """Devices that nothing else uses."""

    pool: ResourcePool

    def acquire(self) -> Mapping[str, Any]:
        """Take the devices and return the options of the actor; raises a ClusterError."""
        self.pool.acquire()
        return actor_resources(self.pool.per_node()) | {"scheduling_strategy": self.pool.bundle(0)}

    def release(self) -> None:
        self.pool.release()

    def adapted(self, launch: ServerLaunch) -> ServerLaunch:
        slot = self.pool.slots()[0]
        cores = cores_on(slot.node_ip) * self.pool.world_size // (self.pool.world_size + self.pool.neighbors)
        return replace(launch, threads=max(1, cores // self.pool.world_size))


@dataclass(frozen=True)
class SharedDevices:
    """Devices of processes that train, on one node; on CPU, their cores."""

    node_id: str
    devices: str | None  # such as "0,1"; None on CPU

    def acquire(self) -> Mapping[str, Any]:
        there = NodeAffinitySchedulingStrategy(self.node_id, soft=False)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": there}

    def release(self) -> None:
        """Do nothing: others hold the devices."""

    def adapted(self, launch: ServerLaunch) -> ServerLaunch:
        return replace(launch, devices=self.devices)


class Replica:
    """A replica that can be started, and started again after its end.

    Example::

        replica = Replica(launch, OwnDevices(pool))
        replica.start()  # the URL that ends in /v1
        replica.wait()   # blocks until it has died: "was killed by SIGKILL"
        replica.close()
    """

    def __init__(self, launch: ServerLaunch, place: OwnDevices | SharedDevices) -> None:
        self.launch, self.place = launch, place
        self._actor: Any = None

    def start(self) -> str:
        """Start the server and return its URL.

        Raises:
            ClusterError: There are no devices for it.
            RuntimeError: It ended while it started, or took too long; the message has the end of its log.
        """
        options = self.place.acquire()
        try:
            is_cpu = self.launch.device == "cpu"
            variables = CPU_CACHES | child_environment() if is_cpu else one_device_each()
            actor_class = ray.remote(max_restarts=0)(ReplicaActor)
            actor = actor_class.options(**options, max_concurrency=CALLS, runtime_env={"env_vars": variables})
            self._actor = actor.remote(self.place.adapted(self.launch))
            return ray.get(self._actor.start_for.remote(get_node_ip_address()))
        except RayError as error:
            self.close()
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise RuntimeError(f"`reward_servers.{self.launch.name}` did not start: {cause}") from error
        except BaseException:
            self.close()
            raise

    def wait(self) -> str:
        """Wait until the server, its process or its node is gone, and say how it ended."""
        try:
            return ray.get(self._actor.wait.remote())
        except RayError as error:
            return f"was lost: {error}"

    def sleep(self) -> None:
        ray.get(self._actor.sleep.remote())

    def wake(self) -> None:
        ray.get(self._actor.wake.remote())

    def close(self) -> None:
        """End the server and free its devices. Safe to call twice."""
        actor, self._actor = self._actor, None
        if not ray.is_initialized():
            return
        if actor is not None:
            # Ray would kill the guardian of the server first, which then could not end what vLLM has started.
            with suppress(RayError):  # the actor has died
                ray.get(actor.close.remote(), timeout=CLOSE_S)
            ray.kill(actor)
        self.place.release()
