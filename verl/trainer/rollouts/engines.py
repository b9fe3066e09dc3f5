# SPDX-License-Identifier: Apache-2.0
"""The rollout engines of a run, in the processes that train or in processes of their own."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from verl.config.worker import WorkerConfig
from verl.protocol import DataProto
from verl.single_controller.dispatch import shard
from verl.single_controller.ray.published_weights import PublishedWeights
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.metrics import StageTimer
from verl.workers.rollout.base import FinishedResponse, SamplingOptions

T = TypeVar("T")


class Engines(Protocol):
    """All engines of a run."""

    @property
    def groups(self) -> Sequence[RayWorkerGroup]:
        """The processes of each engine."""
        ...

    def awake(self, version: int, timer: StageTimer) -> AbstractContextManager[None]:
        """Keep the engines awake inside the block, with the weights of now: those after `version` steps."""
        ...

    def generate(self, prompts: DataProto, options: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Sample responses to prompts and yield them as they finish."""
        ...

    def state(self) -> list[Any]:
        """Return the random states of the engines that the workers' own checkpoints do not hold."""
        ...

    def set_state(self, state: Sequence[Any]) -> None:
        """Restore what `state` returned, for the first engines if their number has changed."""
        ...


class SharedEngines:
    """Engines in the processes that train, which sleep while those train."""

    def __init__(self, workers: RayWorkerGroup, config: WorkerConfig) -> None:
        self.workers, multi_turn = workers, config.rollout.multi_turn
        self._groups: Sequence[RayWorkerGroup] = ()
        # A frozen tower of the policy encodes media for both, unless others than the rows give the prompts.
        self.encodes_first = config.actor.model.freeze_vision_tower and (
            multi_turn.environment is None and multi_turn.agent is None
        )

    @contextmanager
    def awake(self, version: int, timer: StageTimer) -> Iterator[None]:
        with timer("sync_weights"):
            self.workers.sync_weights(version)
        yield
        self.workers.sleep_engine()  # not after an exception: the workers may be gone, and the run ends

    @property
    def groups(self) -> Sequence[RayWorkerGroup]:
        self._groups = self._groups or self.workers.parts("rollout")
        return self._groups

    def generate(self, prompts: DataProto, options: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        if self.encodes_first and any(prompts.non_tensor_batch["multi_modal_data"]):
            list(self.workers.encode_media(prompts.select([], ["multi_modal_data"])))
        return self.workers.generate(prompts, options)

    def state(self) -> list[Any]:
        return []

    def set_state(self, state: Sequence[Any]) -> None:
        """Do nothing: the workers restore it with their models."""


class OwnEngines:
    """Engines in processes of their own, each a worker group; they are always awake.

    Args:
        workers: The processes that train, and publish their weights.
        start_another: Starts an engine whose random numbers follow from the number that it is given.
    """

    def __init__(
        self,
        workers: RayWorkerGroup,
        groups: Sequence[RayWorkerGroup],
        start_another: Callable[[int], RayWorkerGroup],
    ) -> None:
        self.workers, self._groups, self.start_another = workers, list(groups), start_another
        self.version: int | None = None  # of the newest published weights: the number of steps before
        self.weights: PublishedWeights | None = None  # that all engines have loaded
        self._is_compared = False

    @property
    def groups(self) -> Sequence[RayWorkerGroup]:
        return self._groups

    @contextmanager
    def awake(self, version: int, timer: StageTimer) -> Iterator[None]:
        self.load(version, timer)
        yield

    def load(self, version: int, timer: StageTimer) -> None:
        """Send the weights of now, those after `version` steps, to all engines that have others."""
        if version == self.version:
            return
        with timer("sync_weights"):
            weights = self.publish(version)
            on_all([partial(group.load_weights, weights) for group in self.groups])
        self.weights = weights
        if not self._is_compared:
            self._compare()

    def publish(self, version: int) -> PublishedWeights:
        """Offer the weights of now, for each engine to load."""
        self.version = version
        return PublishedWeights(version, tuple(self.workers.publish_weights(version)))

    def generate(self, prompts: DataProto, options: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        parts = shard(prompts, len(self.groups), even=False)
        shares = zip(self.groups, parts, strict=True)
        return merged([partial(group.generate, part, options) for group, part in shares])

    def replace(self, number: int, restarts: int) -> None:
        """Start another engine in the place of a lost one; it has no weights yet.

        Args:
            restarts: Number of engines that the run has started again, with this one.
        """
        self._groups[number] = self.start_another(number + restarts * len(self.groups))

    def state(self) -> list[Any]:
        return on_all([group.rng_state for group in self.groups])

    def set_state(self, state: Sequence[Any]) -> None:
        for group, states in zip(self.groups, state, strict=False):
            group.set_rng_state(states[0])

    def _compare(self) -> None:
        """Compare the first engine with the trainer, once, for a model that no file describes."""
        sampled = self.groups[0].rows_to_compare()[0]
        if sampled is not None:
            self.workers.compare_engine(*sampled)
        self._is_compared = True


def on_all(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at once and return their results in order; the first error is raised."""
    return [result for _, result in sorted(merged([partial(_numbered, *each) for each in enumerate(calls)]))]


def _numbered(number: int, call: Callable[[], T]) -> Iterator[tuple[int, T]]:
    yield number, call()


def merged(streams: Sequence[Callable[[], Iterator[T]]]) -> Iterator[T]:
    """Read streams at once, each in a thread, and yield their items as they arrive; an error is raised."""
    arrived: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
    is_left = threading.Event()  # the reader does not want the rest

    def read(stream: Callable[[], Iterator[T]]) -> None:
        end: Any = None
        try:
            for item in stream():
                arrived.put((False, item))
                if is_left.is_set():
                    break
        except BaseException as error:  # noqa: BLE001 - raised by the reader
            end = error
        arrived.put((True, end))

    for number, stream in enumerate(streams):
        threading.Thread(target=read, args=(stream,), name=f"engine {number}", daemon=True).start()
    running = len(streams)
    try:
        while running:
            is_end, value = arrived.get()
            if not is_end:
                yield value
            elif value is not None:
                raise value
            else:
                running -= 1
    finally:
        is_left.set()
