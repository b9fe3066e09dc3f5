# SPDX-License-Identifier: Apache-2.0
"""The models of `reward_servers` in a run: started with it, awake while responses are scored."""

import secrets
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ray.exceptions import RayError

from verl.config.reward_servers import RewardServerConfig
from verl.logger.console.start_up import phase
from verl.protocol import DataProto
from verl.rewards.servers import SECTION, AddressFile, ServerSpec
from verl.single_controller.ray.processes import WorkerProcesses
from verl.single_controller.ray.resource_pool import ClusterError
from verl.trainer.metrics import Metrics, StageTimer
from verl.trainer.prepare import engine_pool
from verl.trainer.reward_servers.replica import OwnDevices, Replica, SharedDevices
from verl.utils.background import in_background
from verl.utils.rank_logger import get_logger
from verl.workers.rollout.model_server import ServerLaunch

LOGS = "reward_servers"  # folder of the servers' output, in that of the run

logger = get_logger(__name__)


class ServedModel:
    """Keeps the replicas of a model running: one that dies is started again, in the background.

    A model that sleeps has no address. A replica that dies meanwhile starts when the model wakes, because
    others have the devices until then.

    Args:
        file: Tells scoring processes the addresses.
        max_restarts: Of all replicas together; a replica that dies after these stays away.
        sleeps: It shares devices, and is awake only between `wake` and `sleep`.
    """

    def __init__(
        self, name: str, replicas: Sequence[Replica], file: AddressFile, *, max_restarts: int, sleeps: bool
    ) -> None:
        self.name, self.file, self.replicas = name, file, replicas
        self.num_restarts = 0
        self.is_awake = self._has_devices = not sleeps
        self._max_restarts = max_restarts
        self._urls: dict[int, str] = {}  # of living replicas, by number
        self._starting: set[int] = set()  # numbers of replicas
        self._lost: dict[int, str] = {}  # replicas that stay away, and why
        self._changed = threading.Condition()  # guards everything above
        self._is_closed = False
        self.file.publish([])
        self._starts = [
            in_background(lambda number=number: self._start(number), f"server {name} {number}")
            for number in range(len(replicas))
        ]

    def wait_until_started(self) -> None:
        """Wait for the first start of all replicas; a model that sleeps does so from then on.

        Raises:
            ClusterError: There are no devices for one.
            RuntimeError: One did not start.
        """
        for start in self._starts:
            start.result()
        for number in range(len(self.replicas)):
            in_background(lambda number=number: self._keep(number), f"keeper of {self.name} {number}")
        logger.info(
            "serving a model for the reward: %s.%s replicas=%d", SECTION, self.name, len(self.replicas)
        )

    def wake(self) -> None:
        """Give the model its addresses; replicas that died while it slept start first."""
        with self._changed:
            self._has_devices = True
            living = list(self._urls)
            self._changed.notify_all()
        for number in living:
            self._tell(number, "wake")
        with self._changed:
            self.is_awake = True
            self._publish()

    def sleep(self) -> None:
        """Take the addresses back and free the devices, also those of a replica that is starting."""
        with self._changed:
            self._changed.wait_for(lambda: not self._starting)
            self._has_devices = self.is_awake = False
            self._publish()
            living = list(self._urls)
        for number in living:
            self._tell(number, "sleep")

    def close(self) -> None:
        """End all replicas."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for replica in self.replicas:
            replica.close()

    def _tell(self, number: int, what: str) -> None:
        """Have a replica sleep or wake; if it has died, its keeper starts it again."""
        try:
            getattr(self.replicas[number], what)()
        except RayError as error:
            logger.warning("a reward server does not %s: %s: %s", what, self.name, error)

    def _start(self, number: int) -> None:
        with self._changed:
            self._starting.add(number)
        try:
            url = self.replicas[number].start()
            if not self._has_devices:
                self.replicas[number].sleep()
            with self._changed:
                self._urls[number] = url
                self._publish()
        finally:
            with self._changed:
                self._starting.remove(number)
                self._changed.notify_all()

    def _keep(self, number: int) -> None:
        """Start a replica again whenever it has died, as often as that is allowed."""
        how = self.replicas[number].wait()
        while self._may_restart(number, how):
            try:
                self._start(number)
            except (ClusterError, RuntimeError) as error:
                how = str(error)
            else:
                how = self.replicas[number].wait()

    def _may_restart(self, number: int, how: str) -> bool:
        """Wait until a dead replica may start again, and count that; False if it may not."""
        with self._changed:
            self._urls.pop(number, None)
            if self._is_closed:
                return False
            self._publish()
            self.replicas[number].close()
            self._changed.wait_for(lambda: self._has_devices or self._is_closed)
            if self._is_closed:
                return False
            if self.num_restarts >= self._max_restarts:
                self._lost[number] = how
                logger.warning("a reward server is lost: %s.%s: %s", SECTION, self.name, how)
                self._publish()
                return False
            self.num_restarts += 1
            self._starting.add(number)  # before anything that waits can have this model sleep
            logger.warning("a reward server is started again: %s.%s: %s", SECTION, self.name, how)
            return True

    def _publish(self) -> None:
        lost = None
        if len(self._lost) == len(self.replicas):
            number, how = next(reversed(self._lost.items()))
            lost = (
                f"all {len(self.replicas)} replicas of `{SECTION}.{self.name}` are lost, after"
                f" `max_restarts` ({self._max_restarts}) restarts; replica {number} {how}"
            )
        urls = [self._urls[number] for number in sorted(self._urls)] if self.is_awake else []
        self.file.publish(urls, lost)


class RewardServers(AbstractContextManager["RewardServers"]):
    """All models that the reward function asks, and the teachers that are served.

    Example::

        with RewardServers(config.reward_servers, "cuda", folder, num_devices=8) as servers:
            servers.start_own()                # in the background
            ...                                # start the processes that train
            servers.start_shared_and_wait(processes)    # on their devices
            with servers.awake():
                ...                            # `servers.specs` say where they are
    """

    def __init__(
        self, configs: Mapping[str, RewardServerConfig], device: str, folder: Path, num_devices: int
    ) -> None:
        self.configs, self.device, self.num_devices = configs, device, num_devices
        self.logs = folder / LOGS
        self.models: dict[str, ServedModel] = {}
        self._boards = tempfile.TemporaryDirectory(prefix="verl-reward-servers-")
        self._key = secrets.token_urlsafe()
        self._lock = threading.RLock()
        self._num_awake = 0  # blocks of `awake` that are open
        self.specs = {name: ServerSpec(name, config, self._file(name)) for name, config in configs.items()}

    @property
    def judges(self) -> dict[str, ServerSpec]:
        """The models that the reward function asks."""
        return {name: spec for name, spec in self.specs.items() if not spec.config.teaches}

    @property
    def share_devices(self) -> bool:
        """True if a model runs on devices that train, so that nothing is scored while those sample."""
        return any(config.is_served and config.colocate for config in self.configs.values())

    def start_own(self) -> None:
        """Start the models with dedicated devices, in the background."""
        for name, config in self.configs.items():
            if config.takes_devices:
                size, option = config.tensor_parallel_size, f"{SECTION}.{name}.n_gpus"
                pools = [
                    engine_pool(self.num_devices, size, self.device, option)
                    for _ in range(config.num_replicas)
                ]
                self._start(name, [OwnDevices(pool) for pool in pools])

    def start_shared_and_wait(self, processes: WorkerProcesses) -> None:
        """Start the models that share the devices of processes, one after the other, and wait for all models.

        The shared models sleep then.
        """
        if not self.configs:
            return
        with phase("reward servers"):
            for name, config in self.configs.items():
                if config.is_served and config.colocate:
                    size, count = config.tensor_parallel_size, config.num_replicas
                    self._start(name, [shared_devices(processes, size * at, size) for at in range(count)])
                    self.models[name].wait_until_started()
            self.wait_until_started()

    def wait_until_started(self) -> None:
        """Wait for all models; raises the error of one that did not start."""
        for name, model in self.models.items():
            if self.configs[name].takes_devices:
                model.wait_until_started()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep all models awake inside the block, which may be entered again inside."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def metrics(self, batch: DataProto, timer: StageTimer) -> tuple[DataProto, Metrics]:
        """Add the number of restarts so far to a step's metrics; a reward stage of the trainer."""
        restarts = {name: float(model.num_restarts) for name, model in self.models.items()}
        return batch, {f"{SECTION}/{name}/restarts": count for name, count in restarts.items()}

    def __exit__(self, *_: object) -> None:
        for model in self.models.values():
            model.close()
        self._boards.cleanup()

    def _count(self, change: int) -> None:
        with self._lock:
            before, self._num_awake = self._num_awake, self._num_awake + change
            sleepers = [model for name, model in self.models.items() if self.configs[name].colocate]
            if before == 0:
                for model in sleepers:
                    model.wake()
            elif self._num_awake == 0:
                for model in sleepers:
                    model.sleep()

    def _file(self, name: str) -> AddressFile | None:
        config = self.configs[name]
        if not config.is_served:
            return None
        path = Path(self._boards.name) / f"{name}.json"
        return AddressFile(path, self._key, str(config.model_path), config.start_timeout_s)

    def _start(self, name: str, places: Sequence[OwnDevices | SharedDevices]) -> None:
        config, addresses = self.configs[name], self.specs[name].addresses
        assert addresses is not None, "the run serves it"
        replicas = [
            Replica(
                ServerLaunch(name, config, self.device, self._key, str(self.logs / f"{name}-{number}.log")),
                place,
            )
            for number, place in enumerate(places)
        ]
        self.models[name] = ServedModel(
            name, replicas, addresses, max_restarts=config.max_restarts, sleeps=config.colocate
        )


def shared_devices(processes: WorkerProcesses, first: int, count: int) -> SharedDevices:
    """Describe the devices of `count` processes from a rank on, which are on one node."""
    slot = processes.pool.slots()[first]
    if processes.pool.device == "cpu":
        return SharedDevices(slot.node_id, None)
    return SharedDevices(slot.node_id, ",".join(processes.visible_devices(first, count)))
