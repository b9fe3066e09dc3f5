# SPDX-License-Identifier: Apache-2.0
"""The rollout engines of a run, in the processes that train or in separate processes."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from operator import methodcaller
from pathlib import Path
from typing import TypeVar

import torch

from verl.config.worker import WorkerConfig
from verl.protocol import DataProto
from verl.single_controller.dispatch import shard
from verl.single_controller.ray.failure import WorkerError
from verl.single_controller.ray.published_weights import PublishedWeights
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.metrics import StageTimer
from verl.trainer.rollouts.engine_registry import EngineRegistry
from verl.utils.background import in_background
from verl.workers.rollout.interface import FinishedResponse, SamplingOptions

ENGINES_FILE = "engines.pt"  # random states of engines in processes of their own

T = TypeVar("T")
Responses = Iterator[list[FinishedResponse]]


class SharedEngines:
    """Engines in the processes that train, which sleep while those train."""

    def __init__(self, workers: RayWorkerGroup, config: WorkerConfig) -> None:
        self.workers, multi_turn = workers, config.rollout.multi_turn
        # A tower of the policy may encode media for both, unless others than the rows give the prompts.
        self.has_prompts_of_rows = multi_turn.environment is None and multi_turn.agent is None

    @contextmanager
    def awake(self, version: int, timer: StageTimer) -> Iterator[None]:
        """Keep the engines awake inside the block, loaded with the weights after `version` steps."""
        with timer("sync_weights"):
            self.workers.sync_weights(version)
        yield
        self.workers.sleep_engine()  # not after an exception: the workers may be gone, and the run ends

    @cached_property
    def encodes_first(self) -> bool:
        """True if the policy's tower encodes media before the engines sample."""
        return self.has_prompts_of_rows and all(self.workers.encodes_media())

    @cached_property
    def groups(self) -> Mapping[int, RayWorkerGroup]:
        """The processes of each engine, by its slot."""
        return dict(enumerate(self.workers.parts("rollout")))

    def generate(self, prompts: DataProto, options: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Sample responses to prompts and yield them as they finish."""
        if any(prompts.non_tensor_batch["multi_modal_data"]) and self.encodes_first:
            list(self.workers.encode_media(prompts.select([], ["multi_modal_data"])))
        return self.workers.generate(prompts, options)

    def save_states(self, folder: Path) -> None:
        """Write the random states of the engines that the workers' own checkpoints do not hold."""

    def load_states(self, folder: Path) -> None:
        """Restore what `save_states` wrote, for the first engines if their number has changed."""


class OwnEngines:
    """Engines in separate processes, each a worker group; they are always awake.

    One that is lost leaves, its work is done by the others, and another may take its place. The `workers`
    train, and publish their weights.
    """

    def __init__(self, workers: RayWorkerGroup, registry: EngineRegistry) -> None:
        self.workers, self.registry = workers, registry
        self.version: int | None = None  # of the newest published weights: the number of steps before
        self.weights: PublishedWeights | None = None  # that all engines have loaded
        self._is_compared = False

    @property
    def groups(self) -> Mapping[int, RayWorkerGroup]:
        return self.registry.living

    @contextmanager
    def awake(self, version: int, timer: StageTimer) -> Iterator[None]:
        self.registry.start_missing()
        self._welcome()
        self.load(version, timer)
        yield

    def load(self, version: int, timer: StageTimer) -> None:
        """Send the current weights, after `version` steps, to every engine with older ones."""
        if version == self.version:
            return
        with timer("sync_weights"):
            weights = self.publish(version)
            self._on(self.groups, lambda group: group.load_weights(weights))
        self.weights = weights
        if not self._is_compared:
            self._compare()

    def publish(self, version: int) -> PublishedWeights:
        """Publish the current weights for the engines to load."""
        self.version = version
        return PublishedWeights(version, tuple(self.workers.publish_weights(version)))

    def generate(self, prompts: DataProto, options: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Sample as any engines do; what a lost one had not finished is sampled again by others."""
        uids = prompts.non_tensor_batch["uid"]
        unfinished = {(uid, sample) for uid in uids for sample in range(options.n)}
        rest, losses = prompts, -1
        while len(rest) and losses < self.registry.num_losses:
            losses = self.registry.num_losses
            for responses in merged(self._shares(rest, options)):
                new = [one for one in responses if (one.uid, one.sample) in unfinished]
                unfinished.difference_update((one.uid, one.sample) for one in new)
                yield new
            left = {uid for uid, _ in unfinished}
            rest = prompts[[row for row, uid in enumerate(uids) if uid in left]]

    def save_states(self, folder: Path) -> None:
        if state := self._on(self.groups, lambda group: group.rng_state()):
            torch.save(state, folder / ENGINES_FILE)

    def load_states(self, folder: Path) -> None:
        path = folder / ENGINES_FILE
        state = torch.load(path, weights_only=False) if path.exists() else ()
        for group, states in zip(self.groups.values(), state, strict=False):
            group.set_rng_state(states[0])

    def _shares(self, prompts: DataProto, options: SamplingOptions) -> list[Callable[[], Responses]]:
        """Divide prompts among the engines that live, of which there is one at least."""
        while not self.groups:
            self.registry.wait()
            self._welcome()
        slots = list(self.groups)
        parts = zip(slots, shard(prompts, len(slots), even=False), strict=True)
        return [
            partial(self._until_lost, slot, methodcaller("generate", part, options))
            for slot, part in parts
            if len(part)
        ]

    def _welcome(self) -> None:
        """Let engines join that have started, with the weights that the others have."""
        joined, weights = self.registry.join(), self.weights
        if weights is not None:
            self._on(joined, lambda group: group.load_weights(weights))

    def _on(self, slots: Iterable[int], call: Callable[[RayWorkerGroup], T]) -> list[T]:
        """Call engines at once and return their results; a lost one has none."""

        def result_of(slot: int) -> list[T]:
            return list(self._until_lost(slot, lambda group: [call(group)]))

        return list(chain.from_iterable(on_all([partial(result_of, slot) for slot in slots])))

    def _until_lost(self, slot: int, read: Callable[[RayWorkerGroup], Iterable[T]]) -> Iterator[T]:
        """Yield what an engine returns, and nothing more once it is lost."""
        try:
            yield from read(self.groups[slot])
        except WorkerError as error:
            if not error.may_go_away:
                raise
            self.registry.lose(slot, error)

    def _compare(self) -> None:
        """Compare the first engine with the trainer, once, for a model without a family of its own."""
        if not self.groups:
            return  # others are being started
        sampled = next(iter(self.groups.values())).rows_to_compare()[0]
        if sampled is not None:
            self.workers.compare_engine(*sampled)
        self._is_compared = True


Engines = SharedEngines | OwnEngines


def on_all(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at once and return their results in order; the first error is raised."""
    futures = [in_background(call, f"engine {number}") for number, call in enumerate(calls)]
    for future in as_completed(futures):
        future.result()
    return [future.result() for future in futures]


def merged(streams: Sequence[Callable[[], Iterator[T]]]) -> Iterator[T]:
    """Read streams at once, each in a thread, and yield their items as they arrive; an error is raised."""
    arrived: queue.SimpleQueue[T | Future[None]] = queue.SimpleQueue()  # items, and the ends of streams
    is_left = threading.Event()  # the reader does not want the rest

    def read(stream: Callable[[], Iterator[T]]) -> None:
        for item in stream():
            arrived.put(item)
            if is_left.is_set():
                break

    for number, stream in enumerate(streams):
        in_background(partial(read, stream), f"engine {number}").add_done_callback(arrived.put)
    running = len(streams)
    try:
        while running:
            item = arrived.get()
            if isinstance(item, Future):
                item.result()
                running -= 1
            else:
                yield item
    finally:
        is_left.set()
