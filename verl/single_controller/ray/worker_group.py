# SPDX-License-Identifier: Apache-2.0
"""Many worker processes called as one object, over Ray: one actor for each device of a resource pool.

The first failure of any rank ends the group: the other ranks may be stuck in a collective that will never
finish, so they are killed and the controller gets a `WorkerError` within seconds.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import ray
from ray import ObjectRefGenerator  # pyright: ignore[reportAttributeAccessIssue] - made by Cython
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.protocol import DataProto
from verl.single_controller.dispatch import (
    Dispatch,
    Place,
    RemoteMethod,
    check_places,
    join,
    remote_methods,
    shard,
)
from verl.single_controller.ray.environment import rank_environments
from verl.single_controller.ray.failure import Failure, WorkerError, is_death, worker_error
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.single_controller.worker import (
    Worker,
    WorkerInfo,
    end_process,
    is_stopped_process,
    read_stacks,
)

GRACE_S = 2.0  # after an exception, for the death that may have caused it to become known
STREAM_WINDOW = 256  # items of a rank that wait unread before its generator pauses
NODE_TIMEOUT_S = 30.0
CHECK_S = 5.0  # between looks at processes that do not answer; two looks must agree
SMALL = (type(None), bool, int, float, str)  # arguments that travel inside the call


class Waiting(NamedTuple):
    """What the controller waits for from one rank: the result of a call or the next item of its stream."""

    call: "Pending"
    rank: int
    reference: Any  # an `ObjectRef` or an `ObjectRefGenerator`


@dataclass(eq=False)
class Pending:
    """A call under way on all ranks."""

    group: "RayWorkerGroup"
    method: RemoteMethod
    places: list[Place] | None
    unfinished: dict[int, Any]  # by rank: an `ObjectRef` or an `ObjectRefGenerator`
    results: dict[int, Any] = field(default_factory=dict)  # by rank
    items: deque[Any] = field(default_factory=deque)  # of a stream, not yet read
    is_abandoned: bool = False  # a stream whose reader left: what still comes is dropped

    def result(self) -> Any:
        """Wait for all ranks and return their joined results.

        Raises:
            WorkerError: A rank failed; the group is gone.
        """
        while self.unfinished:
            self.group.advance()
        return join(self.method, [self.results[rank] for rank in sorted(self.results)], self.places)

    def stream(self) -> Iterator[Any]:
        """Yield the items of all ranks as they come; reading to the end waits for all ranks."""
        try:
            while self.unfinished or self.items:
                while self.items:
                    yield self.items.popleft()
                if self.unfinished:
                    self.group.advance()
        finally:
            self.is_abandoned = True
            self.items.clear()


class RayWorkerGroup:
    """Starts one `Worker` on each device of a pool and calls them together.

    Every method marked with `@register` is a method of the group: it blocks and returns the joined results,
    or for a streaming method returns an iterator. `start` is the form that does not block.

    Example::

        with RayWorkerGroup(pool, MyWorker, config, env={"VLLM_NO_USAGE_STATS": "1"}) as group:
            group.init_model()
            batch = batch.union(group.compute_log_probs(batch))
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker_class: type[Worker],
        *args: Any,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the pool's resources and start the workers.

        Args:
            pool: Belongs to this group from now on; released by `shutdown`.
            worker_class: What runs on each rank.
            *args: For its constructor, on all ranks.
            env: Environment variables of the workers, set before they import anything.
            timeout_s: A call in which no rank makes progress for this long, in seconds, fails and shows where
                each rank stands; None waits for ever.
            **kwargs: For its constructor, on all ranks.
        """
        self.pool = pool
        self.methods = remote_methods(worker_class)
        self.timeout_s = timeout_s
        self.workers: list[Any] = []  # Ray's actor handles
        self.infos: list[WorkerInfo] = []
        self._calls: list[Pending] = []
        self._places: dict[str, list[Place]] = {}
        try:
            pool.acquire()
            self._start_workers(worker_class, args, kwargs, env or {})
            self.infos = self._internal("info", phase="start")
        except BaseException:
            self.kill()
            raise

    def __getattr__(self, name: str) -> Any:
        """Return a registered method of the workers as a method of the group."""
        if name in self.__dict__.get("methods", {}):
            return partial(self.call, name)
        raise AttributeError(
            f"{name!r} is not a registered method: {sorted(self.__dict__.get('methods', {}))}"
        )

    def __enter__(self) -> "RayWorkerGroup":
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, traceback: Any) -> None:
        if error_type is None:
            self.shutdown()
        else:
            self.kill()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pool.world_size

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method on all ranks; wait for it, or return the iterator of a streaming one."""
        pending = self.start(name, *args, **kwargs)
        return pending.stream() if pending.method.streaming else pending.result()

    def start(self, name: str, *args: Any, **kwargs: Any) -> Pending:
        """Start a registered method on all ranks; calls run one after another in the order of their start.

        Raises:
            ValueError: A batch does not divide evenly over the data-parallel ranks.
        """
        method = self.methods[name]
        places = self._places_on(method.axis) if method.dispatch is Dispatch.SHARD else None
        size = places[0].size if places else 1
        arguments = [_parts(value, size, even=not method.streaming) for value in args]
        keywords = {key: _parts(value, size, even=not method.streaming) for key, value in kwargs.items()}
        references = {}
        for rank, worker in enumerate(self._alive_workers()):
            index = places[rank].index if places else 0
            remote = _remote_form(worker, method, is_first=places is None or places[rank].is_first)
            references[rank] = remote(
                method.name,
                method.phase,
                *(parts[index] for parts in arguments),
                **{key: parts[index] for key, parts in keywords.items()},
            )
        return self._pending(method, places, references)

    def shutdown(self, grace_s: float = 5.0) -> None:
        """Let the workers exit, kill those that have not after `grace_s` seconds, and release the pool."""
        if self.workers and ray.is_initialized() and not any(call.unfinished for call in self._calls):
            ends = [worker.__ray_terminate__.remote() for worker in self.workers]
            ray.wait(ends, num_returns=len(ends), timeout=grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill the workers and release the pool; harmless when that is done."""
        workers, self.workers = self.workers, []
        self._calls.clear()
        if ray.is_initialized():
            for worker in workers:
                ray.kill(worker)
            self.pool.release()

    def advance(self) -> None:
        """Wait until some rank returns something and keep it for its call.

        Raises:
            WorkerError: A rank raised or died, or none made progress in time.
        """
        self._alive_workers()
        try:
            waiting = self._waiting()
            ready = self._wait(waiting)
            entry = next(entry for entry in waiting if entry.reference is ready[0])
            failure = self._take(entry)
            if failure is not None:
                raise self._failed(failure)
        except (KeyboardInterrupt, SystemExit):
            self.kill()
            raise

    def _wait(self, waiting: list[Waiting]) -> list[Any]:
        """Wait for the next result; from time to time look whether somebody has stopped a process."""
        give_up = time.monotonic() + (self.timeout_s or float("inf"))
        stopped: set[int] = set()
        while True:
            patience = max(0.0, min(CHECK_S, give_up - time.monotonic()))
            ready, _ = ray.wait([entry.reference for entry in waiting], timeout=patience)
            if ready:
                return ready
            if time.monotonic() >= give_up:
                raise self._hung(waiting, f"no rank made progress for {self.timeout_s:g} seconds")
            before, stopped = stopped, self._stopped_ranks()
            if before & stopped:
                ranks = sorted(before & stopped)
                raise self._hung(waiting, f"the processes of ranks {ranks} are stopped (SIGSTOP)", ranks)

    def _start_workers(
        self, worker_class: type[Worker], args: tuple, kwargs: dict[str, Any], env: dict[str, str]
    ) -> None:
        actor_class = ray.remote(max_restarts=0)(worker_class)
        slots = self.pool.slots()
        for slot, environment in zip(slots, rank_environments(self.pool, slots), strict=True):
            options = actor_class.options(
                num_cpus=self.pool.per_process()["CPU"],
                num_gpus=self.pool.per_process().get("GPU", 0),
                scheduling_strategy=self.pool.bundle(slot.bundle),
                runtime_env={"env_vars": environment | env},
            )
            self.workers.append(options.remote(*args, **kwargs))

    def _internal(self, name: str, phase: str) -> list[Any]:
        """Call a method of `Worker` itself on all ranks and wait for it."""
        references = {
            rank: getattr(worker, name).remote() for rank, worker in enumerate(self._alive_workers())
        }
        method = RemoteMethod(name, Dispatch.ALL, phase, streaming=False, axis="")
        return self._pending(method, None, references).result()

    def _places_on(self, axis: str) -> list[Place]:
        if axis not in self._places:
            known = self._internal("axes", phase="axes")
            self._places[axis] = check_places(axis, [axes.get(axis) for axes in known])
        return self._places[axis]

    def _alive_workers(self) -> list[Any]:
        if not self.workers:
            raise RuntimeError("the worker group is shut down")
        return self.workers

    def _pending(
        self, method: RemoteMethod, places: list[Place] | None, references: dict[int, Any]
    ) -> Pending:
        pending = Pending(self, method, places, references)
        self._calls = [call for call in self._calls if call.unfinished]
        self._calls.append(pending)
        return pending

    def _waiting(self) -> list[Waiting]:
        """Return what all calls still wait for: a failure in an older call also ends a newer one."""
        return [
            Waiting(call, rank, reference)
            for call in self._calls
            for rank, reference in call.unfinished.items()
        ]

    def _take(self, entry: Waiting) -> Failure | None:
        """Move what is ready from a rank to its call; return the failure if it is one."""
        call, rank, reference = entry
        del call.unfinished[rank]
        try:
            if not isinstance(reference, ObjectRefGenerator):
                call.results[rank] = ray.get(reference)
                return None
            item = ray.get(next(reference))
        except StopIteration:
            call.results[rank] = None
            return None
        except RayError as error:
            return Failure(rank, call.method, error)
        if not call.is_abandoned:
            call.items.append(item)
        call.unfinished[rank] = reference  # at the end: the ranks take turns
        return None

    def _failed(self, first: Failure) -> WorkerError:
        """Kill the group; the cause of several failures is a rank that died, else the first that raised."""
        failures = [first]
        deadline = time.monotonic() + GRACE_S
        while not is_death(failures[-1]) and time.monotonic() < deadline and (waiting := self._waiting()):
            ready, _ = ray.wait(
                [entry.reference for entry in waiting], timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            failure = self._take(next(entry for entry in waiting if entry.reference is ready[0]))
            if failure is not None:
                failures.append(failure)
        self.kill()
        failures.sort(key=lambda failure: not is_death(failure))
        return worker_error(failures, self.infos, self.world_size)

    def _hung(self, waiting: list[Waiting], what: str, stopped: Sequence[int] = ()) -> WorkerError:
        """Ask the ranks that have not returned where they stand, then kill the group."""
        ranks = sorted({entry.rank for entry in waiting})
        stacks = self._stacks([rank for rank in ranks if rank not in stopped])
        self._on_nodes(end_process, stopped)  # they would not hear Ray
        self.kill()
        method = waiting[0].call.method
        text = f"{what} in phase `{method.phase}` (method `{method.name}`); still running: ranks {ranks}"
        for rank, stack in stacks.items():
            text += f"\n\nstacks of rank {rank}:\n{stack}"
        return WorkerError(text, rank=[*stopped, *ranks][0], phase=method.phase, died=False, hung=True)

    def _stopped_ranks(self) -> set[int]:
        return {rank for rank, is_stopped in self._on_nodes(is_stopped_process).items() if is_stopped is True}

    def _stacks(self, ranks: list[int]) -> dict[int, Any]:
        return self._on_nodes(read_stacks, ranks)

    def _on_nodes(
        self, function: Callable[[WorkerInfo], Any], ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Call a function of a worker's info on its machine; by rank what it returned, or why it did not."""
        chosen = [info for info in self.infos if ranks is None or info.rank in ranks]
        found = {info.rank: _called(function, info) for info in chosen if info.host == socket.gethostname()}
        slots = self.pool.slots()
        task = ray.remote(num_cpus=0)(function)
        references = {}
        for info in chosen:
            if info.rank not in found:
                there = NodeAffinitySchedulingStrategy(slots[info.rank].node_id, soft=False)
                references[info.rank] = task.options(scheduling_strategy=there).remote(info)
        if references:
            ready, _ = ray.wait(
                list(references.values()), num_returns=len(references), timeout=NODE_TIMEOUT_S
            )
            found |= {
                rank: _called(ray.get, reference)
                for rank, reference in references.items()
                if reference in ready
            }
        return found


def _called(function: Callable[[Any], Any], argument: Any) -> Any:
    """What it returns, or in words what kept it from it: the hang is the error to raise, not this."""
    try:
        return function(argument)
    except (OSError, RayError) as error:
        return f"not readable: {error}"


def _remote_form(worker: Any, method: RemoteMethod, is_first: bool) -> Any:
    if not method.streaming:
        return worker.execute.remote
    if not is_first:
        return worker.drain.remote
    options = {"num_returns": "streaming", "_generator_backpressure_num_objects": STREAM_WINDOW}
    return worker.stream.options(**options).remote


def _parts(value: Any, size: int, even: bool) -> list[Any]:
    """Return what each place on the axis is given: every part of a batch is stored once, whoever reads it."""
    if isinstance(value, DataProto):
        return [ray.put(part) for part in shard(value, size, even)]
    return [value if isinstance(value, SMALL) else ray.put(value)] * size
