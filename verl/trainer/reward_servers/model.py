# SPDX-License-Identifier: Apache-2.0
"""A served model: its replicas, their restarts, and the file with their addresses for scoring processes."""

import threading
from collections.abc import Sequence

from ray.exceptions import RayError

from verl.rewards.servers import SECTION, AddressFile
from verl.single_controller.ray.resource_pool import ClusterError
from verl.trainer.reward_servers.replica import Replica
from verl.utils.background import in_background
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


class ServedModel:
    """Keeps the replicas of a model running: one that dies is started again, in the background.

    A model that sleeps has no address. A replica that dies meanwhile starts when the model wakes, because
    others have the devices until then.

    Args:
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
