# SPDX-License-Identifier: Apache-2.0
"""Track the live rollout engines of a run, and restart lost ones."""

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from verl.single_controller.ray.failure import WorkerError
from verl.single_controller.ray.resource_pool import ClusterError
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.utils.background import in_background
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


class EngineRegistry:
    """Engines have slots, from 0; a slot is empty if its engine was lost, or none has started there yet.

    Engines start in the background, while others sample and the model trains. Any thread may call methods.

    Args:
        start: Starts an engine, whose random numbers follow from the number that it is given, and waits
            for it; raises a ClusterError if there are no devices for it.
        num_free: Returns the number of engines that the free devices of the cluster suffice for.
        max_restarts: Engines that may start where others were lost.

    Attributes:
        living: The engines in use, by slot; a new mapping after each change.
        num_losses, num_restarts: Engines so far that were lost, and that started in their slots.
        on_start: Called by another thread when a start has succeeded or failed.
    """

    def __init__(
        self,
        engines: Sequence[RayWorkerGroup],
        start: Callable[[int], RayWorkerGroup],
        num_free: Callable[[], int],
        *,
        num_slots: int,
        max_restarts: int,
    ) -> None:
        self.living = dict(enumerate(engines))
        self.num_losses = self.num_restarts = 0
        self.on_start: Callable[[], None] = lambda: None
        self.num_slots, self.max_restarts = num_slots, max_restarts
        self._start, self._num_free = start, num_free
        self._changed = threading.Condition()  # guards everything below, and the attributes
        self._num_begun = len(engines)  # starts, with those before this object
        self._starting: set[int] = set()  # slots
        self._started: dict[int, RayWorkerGroup] = {}  # have not joined
        self._errors: dict[int, BaseException] = {}  # that emptied slots, in their order
        self._is_closed = False

    def lose(self, slot: int, error: WorkerError) -> None:
        """Remove a lost engine, and start another in its slot if that is still allowed."""
        with self._changed:
            self.living = {other: engine for other, engine in self.living.items() if other != slot}
            self.num_losses += 1
            self._errors[slot] = error
            if self._begin(slot):
                logger.warning("rollout engine %d is lost and is started again: %s", slot, error)
            else:
                logger.warning("rollout engine %d is lost: others=%d: %s", slot, len(self.living), error)

    def start_missing(self) -> None:
        """Start engines at empty slots, as many as there are free devices for; once a step is enough."""
        with self._changed:
            taken = self.living.keys() | self._starting | self._started.keys()
            empty = [slot for slot in range(self.num_slots) if slot not in taken]
            missing = [slot for slot in empty if self._may_begin(slot)]
            for slot in missing[: self._num_free()] if missing else ():
                self._begin(slot)

    def join(self) -> list[int]:
        """Let engines that have started live, without weights, and return their slots."""
        with self._changed:
            joined, self._started = self._started, {}
            self.living = self.living | joined
            for slot in joined:
                self._errors.pop(slot, None)
                logger.info("rollout engine %d joins: engines=%d", slot, len(self.living))
            return list(joined)

    def wait(self) -> None:
        """Wait until an engine has started; raise as `check` does if none will."""
        with self._changed:
            while not self._started:
                self.check(range(self.num_slots))
                self._changed.wait()

    def check(self, slots: Collection[int]) -> None:
        """Raise the last error of these slots if they are empty and no engine is starting there."""
        with self._changed:
            taken = self.living.keys() | self._starting | self._started.keys()
            if taken.isdisjoint(slots):
                raise next(error for slot, error in reversed(self._errors.items()) if slot in slots)

    def close(self) -> None:
        """Start nothing more; what is starting ends when it has started."""
        with self._changed:
            self._is_closed = True

    def _begin(self, slot: int) -> bool:
        """Start an engine in the background, unless too many were lost."""
        if not self._may_begin(slot):
            return False
        is_restart = slot in self._errors
        self.num_restarts += is_restart
        self._starting.add(slot)
        in_background(partial(self._start_at, slot, self._num_begun, is_restart), f"start of engine {slot}")
        self._num_begun += 1
        return True

    def _may_begin(self, slot: int) -> bool:
        is_restart = slot in self._errors
        return not self._is_closed and (not is_restart or self.num_restarts < self.max_restarts)

    def _start_at(self, slot: int, number: int, is_restart: bool) -> None:
        engine: RayWorkerGroup | None = None
        problem: BaseException | None = None
        try:
            engine = self._start(number)
        except BaseException as error:  # noqa: BLE001 - raised by `check`
            problem = error
        with self._changed:
            self._starting.remove(slot)
            if self._is_closed:
                if engine is not None:
                    engine.kill()
                return
            if engine is not None:
                self._started[slot] = engine
            if problem is not None:
                self._note_failure(slot, problem, is_restart)
            self._changed.notify_all()
        self.on_start()

    def _note_failure(self, slot: int, problem: BaseException, is_restart: bool) -> None:
        logger.warning("rollout engine %d does not start: others=%d: %s", slot, len(self.living), problem)
        if isinstance(problem, ClusterError):  # the slot is as empty as it was
            self.num_restarts -= is_restart
        else:
            self._errors[slot] = problem
