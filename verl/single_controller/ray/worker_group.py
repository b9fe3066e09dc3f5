# SPDX-License-Identifier: Apache-2.0
"""Worker processes called as one object over Ray: one actor for each device of a resource pool.

The first failure of any rank ends the group: the other ranks may be stuck in a collective that never
finishes, so they are killed and the controller gets a `WorkerError` within seconds.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import ray
from ray import ObjectRefGenerator  # pyright: ignore[reportAttributeAccessIssue] - made by Cython
from ray.exceptions import RayError

from verl.protocol import DataProto
from verl.single_controller import dispatch
from verl.single_controller.dispatch import AxisRank, Dispatch, RemoteMethod
from verl.single_controller.ray.failure import Failure, WorkerError, is_death, worker_error
from verl.single_controller.ray.processes import WorkerProcesses
from verl.single_controller.ray.resource_pool import ResourcePool, run_on_node
from verl.single_controller.worker import Worker, WorkerInfo, end_process, is_stopped_process, read_stacks

GRACE_S = 2.0  # after an exception, to learn of a death that may have caused it
STREAM_WINDOW = 256  # unread items of a rank before its generator pauses
NODE_TIMEOUT_S = 30.0
CHECK_S = 5.0  # between checks for stopped processes; two checks must agree
SMALL = (type(None), bool, int, float, str)  # arguments sent inside the call


class Waiting(NamedTuple):
    """An outstanding result of one rank: of a call, or the next item of its stream."""

    call: "Pending"
    rank: int
    reference: Any  # an `ObjectRef` or an `ObjectRefGenerator`


@dataclass(eq=False)
class Pending:
    """A running call on all ranks."""

    group: "RayWorkerGroup"
    method: RemoteMethod
    axis_ranks: list[AxisRank] | None
    unfinished: dict[int, Any]  # by rank: an `ObjectRef` or an `ObjectRefGenerator`
    results: dict[int, Any] = field(default_factory=dict)  # by rank
    items: deque[Any] = field(default_factory=deque)  # unread items of a stream
    is_abandoned: bool = False  # the reader of the stream left: further items are dropped

    def result(self) -> Any:
        """Wait for all ranks and return their joined results; a WorkerError means that the group is gone."""
        while self.unfinished:
            self.group.advance()
        return dispatch.join(
            self.method, [self.results[rank] for rank in sorted(self.results)], self.axis_ranks
        )

    def stream(self) -> Iterator[Any]:
        """Yield the items of all ranks as they arrive; reading to the end waits for all ranks."""
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
    or for a streaming method returns an iterator. `start` is the non-blocking form.

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
        processes: WorkerProcesses | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the pool's resources and start the workers with the given constructor arguments.

        `shutdown` releases the pool. `env` is set before a worker imports anything. A call without progress
        of any rank for `timeout_s` seconds fails with the stack of each rank; None waits forever. `processes`
        of the pool that were started ahead become the workers; their `env` is that of their start.
        """
        self.pool = pool
        self.methods = dispatch.remote_methods(worker_class)
        self.timeout_s = timeout_s
        self.infos: list[WorkerInfo] = []
        self._calls: list[Pending] = []
        self._axes: dict[str, list[AxisRank]] = {}
        self.processes = processes or WorkerProcesses(pool, env or {})
        self.workers: dict[int, Any] = dict(enumerate(self.processes.handles))  # Ray's, by rank
        try:
            self.infos = self._internal("host", "start", worker_class, args, kwargs)
        except BaseException:
            self.kill()
            raise

    def __getattr__(self, name: str) -> Any:
        methods = self.__dict__.get("methods", {})  # not there yet while an instance is unpickled
        if name in methods:
            return partial(self.call, name)
        raise AttributeError(f"{name!r} is not a registered method: {sorted(methods)}")

    def __enter__(self) -> "RayWorkerGroup":
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, traceback: Any) -> None:
        if error_type is None:
            self.shutdown()
        else:
            self.kill()

    @property
    def world_size(self) -> int:
        return self.pool.world_size

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method on all ranks and wait, or return the iterator of a streaming one."""
        pending = self.start(name, *args, **kwargs)
        return pending.stream() if pending.method.streaming else pending.result()

    def start(self, name: str, *args: Any, **kwargs: Any) -> Pending:
        """Start a registered method on all ranks; calls run one after another."""
        method = self.methods[name]
        axis_ranks = self._ranks_on(method.axis) if method.dispatch is Dispatch.SHARD else None
        size = axis_ranks[0].size if axis_ranks else 1
        arguments = [_parts(value, size, method) for value in args]
        keywords = {key: _parts(value, size, method) for key, value in kwargs.items()}
        references = {}
        for rank, worker in self._alive_workers().items():
            index = axis_ranks[rank].index if axis_ranks else 0
            remote = _remote_form(worker, method, is_first=axis_ranks is None or axis_ranks[rank].is_first)
            its_args = [parts[index] for parts in arguments]
            its_kwargs = {key: parts[index] for key, parts in keywords.items()}
            references[rank] = remote(method.name, method.phase, *its_args, **its_kwargs)
        return self._track(Pending(self, method, axis_ranks, references))

    def parts(self, axis: str) -> list["RayWorkerGroup"]:
        """Return the model-parallel groups of an axis as groups, each of which a thread may call.

        Only methods with `Dispatch.ALL`, and not while the whole is called. A failure of one ends all.
        """
        axis_ranks = self._ranks_on(axis)
        parts: list[RayWorkerGroup] = [copy(self) for _ in range(axis_ranks[0].size)]
        for index, part in enumerate(parts):
            ranks = [rank for rank, one in enumerate(axis_ranks) if one.index == index]
            part.workers = {rank: self.workers[rank] for rank in ranks}
            part._calls, part._axes = [], {}
        return parts

    def shutdown(self, grace_s: float = 5.0) -> None:
        """Let the workers exit, kill the remaining ones after `grace_s` seconds, and release the pool."""
        if self.workers and ray.is_initialized() and not any(call.unfinished for call in self._calls):
            for worker in self.workers.values():
                worker.close.remote()
            ends = [worker.__ray_terminate__.remote() for worker in self.workers.values()]
            ray.wait(ends, num_returns=len(ends), timeout=grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill the workers and release the pool; may be called twice."""
        self.workers = {}
        self._calls.clear()
        self.processes.kill()

    def advance(self) -> None:
        """Wait until any rank returns something and store it for its call; raise a WorkerError on failure."""
        self._alive_workers()
        try:
            if failure := self._take(self._wait(self._waiting())):
                raise self._failed(failure)
        except (KeyboardInterrupt, SystemExit):
            self.kill()
            raise

    def _wait(self, waiting: list[Waiting]) -> Waiting:
        """Wait for the next result; periodically check for stopped processes."""
        give_up = time.monotonic() + (self.timeout_s or float("inf"))
        stopped: set[int] = set()
        while True:
            ready = _first_ready(waiting, min(CHECK_S, give_up - time.monotonic()))
            if ready is not None:
                return ready
            if time.monotonic() >= give_up:
                raise self._hung(waiting, f"no rank made progress for {self.timeout_s:g} seconds")
            before, stopped = stopped, self._stopped_ranks()
            if before & stopped:
                ranks = sorted(before & stopped)
                raise self._hung(waiting, f"the processes of ranks {ranks} are stopped (SIGSTOP)", ranks)

    def _internal(self, name: str, phase: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerProcess` itself on all ranks and wait for it."""
        workers = self._alive_workers().items()
        references = {rank: getattr(worker, name).remote(*args) for rank, worker in workers}
        method = RemoteMethod(name, Dispatch.ALL, phase, streaming=False, axis="")
        return self._track(Pending(self, method, None, references)).result()

    def _ranks_on(self, axis: str) -> list[AxisRank]:
        if axis not in self._axes:
            known = self._internal("axes", "axes")
            self._axes[axis] = dispatch.check_axis(axis, [axes.get(axis) for axes in known])
        return self._axes[axis]

    def _alive_workers(self) -> dict[int, Any]:
        if not self.workers:
            raise RuntimeError("the worker group is shut down")
        return self.workers

    def _track(self, call: Pending) -> Pending:
        self._calls = [*(older for older in self._calls if older.unfinished), call]
        return call

    def _waiting(self) -> list[Waiting]:
        # Of all calls: a failure in an older call also ends a newer one.
        return [Waiting(call, *entry) for call in self._calls for entry in call.unfinished.items()]

    def _take(self, entry: Waiting) -> Failure | None:
        """Store an available result in its call; return the failure if it is one."""
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
        call.unfinished[rank] = reference  # moves to the end, so that ranks take turns
        return None

    def _failed(self, first: Failure) -> WorkerError:
        """Kill the group; the cause is a rank that died, otherwise the first that raised."""
        failures = [first]
        deadline = time.monotonic() + GRACE_S
        while not is_death(failures[-1]) and time.monotonic() < deadline and (waiting := self._waiting()):
            ready = _first_ready(waiting, deadline - time.monotonic())
            if ready is None:
                break
            if failure := self._take(ready):
                failures.append(failure)
        self.kill()
        failures.sort(key=lambda failure: not is_death(failure))  # stable: deaths first
        return worker_error(failures, self.infos, self.world_size)

    def _hung(self, waiting: list[Waiting], what: str, stopped: Sequence[int] = ()) -> WorkerError:
        """Collect the stacks of the ranks that have not returned, then kill the group."""
        ranks = sorted({entry.rank for entry in waiting})
        stacks = self._on_nodes(read_stacks, [rank for rank in ranks if rank not in stopped])
        self._on_nodes(end_process, stopped)  # stopped processes do not react to Ray
        self.kill()
        method = waiting[0].call.method
        text = f"{what} in phase `{method.phase}` (method `{method.name}`); still running: ranks {ranks}"
        for rank, stack in stacks.items():
            text += f"\n\nstacks of rank {rank}:\n{stack}"
        return WorkerError(text, rank=[*stopped, *ranks][0], phase=method.phase, died=False, hung=True)

    def _stopped_ranks(self) -> set[int]:
        found = self._on_nodes(is_stopped_process)  # an error text does not count
        return {rank for rank, is_stopped in found.items() if is_stopped is True}

    def _on_nodes(
        self, function: Callable[[WorkerInfo], Any], ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Call a function on each worker's machine; return results, or error texts, by rank."""
        chosen = [info for info in self.infos if ranks is None or info.rank in ranks]
        here, slots = socket.gethostname(), self.pool.slots()
        found = {info.rank: _called(function, info) for info in chosen if info.host == here}
        others = [info for info in chosen if info.rank not in found]
        references = {run_on_node(slots[info.rank].node_id, function, info): info.rank for info in others}
        if references:
            ready, _ = ray.wait(list(references), num_returns=len(references), timeout=NODE_TIMEOUT_S)
            found |= {references[reference]: _called(ray.get, reference) for reference in ready}
        return found


def _first_ready(waiting: list[Waiting], timeout_s: float) -> Waiting | None:
    ready, _ = ray.wait([entry.reference for entry in waiting], timeout=max(0.0, timeout_s))
    return next((entry for entry in waiting if ready and entry.reference is ready[0]), None)


def _called(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except (OSError, RayError) as error:  # the hang is the error to raise, not this one
        return f"not readable: {error}"


def _remote_form(worker: Any, method: RemoteMethod, is_first: bool) -> Any:
    if not method.streaming:
        return worker.execute.remote
    if not is_first:
        return worker.drain.remote
    options = {"num_returns": "streaming", "_generator_backpressure_num_objects": STREAM_WINDOW}
    return worker.stream.options(**options).remote


def _parts(value: Any, size: int, method: RemoteMethod) -> list[Any]:
    if isinstance(value, DataProto):  # each part is stored once, however many ranks read it
        parts = dispatch.shard(value, size, even=not method.streaming, unread=method.unread)
        return [ray.put(part) for part in parts]
    return [value if isinstance(value, SMALL) else ray.put(value)] * size
