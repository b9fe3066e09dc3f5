# SPDX-License-Identifier: Apache-2.0
"""A pool of reward processes, each of which can be killed and replaced.

Each process has a coroutine (`_keep_process`) that starts it, hands it calls, and starts the next one when it
ends.
"""

import asyncio
import os
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from verl.config.worker import RewardConfig
from verl.rewards.function import OPTION, TRACEBACK_HEADING, Scores, describe, split_spec, timeout_message
from verl.rewards.servers import Specs
from verl.rewards.worker_process import Failure, Ready, serve
from verl.utils.processes.child_process import ChildProcess, Serve, frames_of
from verl.utils.processes.serving import (
    PoolBrokenError,
    ProcessEndedError,
    ServingProcess,
    ServingThread,
    run_together,
)
from verl.utils.rank_logger import get_logger

LOAD_TIMEOUT_S = 120.0  # at least this long to import the user's file: it may import torch on a busy machine
LATE_GRACE_S = 2.0  # an `async def` call times out inside its process first, where the reason is known
HOPELESS = 5  # calls of a batch that hang or die, none having succeeded, that end the run

logger = get_logger(__name__)


@dataclass(eq=False)
class Batch:
    """Calls that are scored together."""

    finished: "SimpleQueue[Call]" = field(default_factory=SimpleQueue)  # calls with scores or failed for good
    is_cancelled: threading.Event = field(default_factory=threading.Event)  # it needs no more scores
    has_scores: bool = False


@dataclass(eq=False)
class Call:
    """One call of the reward function on its way through the pool."""

    rows: list[int]
    inputs: list[dict[str, Any]]
    payload: bytes  # pickled (rows, inputs)
    batch: Batch
    failures: list[Failure] = field(default_factory=list)  # one for each failed attempt
    scores: list[Scores] | None = None
    is_suspect: bool = False  # it shared a process that ended, and must not share another
    is_broken: bool = False  # the pool failed, not this call


class RewardPool:
    """Processes that call one reward function.

    A call that fails is repeated `max_retries` times. Calls that shared a process that ended are repeated one
    at a time, so that only the one that ends its process fails.
    """

    def __init__(self, config: RewardConfig, servers: Specs = MappingProxyType({})) -> None:
        path, function_name = split_spec(config.reward_function or "")
        self.function, self.path = f"{path}:{function_name}", str(path)
        self.config = config
        kwargs = dict(config.reward_function_kwargs)
        limits = config.timeout_s, config.memory_limit_gb
        self._serve = partial(serve, self.function, kwargs, config.reward_type, *limits, dict(servers))
        self._processes: list[RewardProcess] = []
        self._open: set[Call] = set()  # submitted and not finished
        self._hopeless: list[Call] = []  # hung or died since the last success, in batches without scores
        self._order = count()
        self._ready: Future[Ready] = Future()
        self._queue: asyncio.PriorityQueue[tuple[int, int, Call]] = asyncio.PriorityQueue()
        keepers = [self._keep_process() for _ in range(config.num_cpus)]
        self._thread = ServingThread("the reward pool", run_together(*keepers), self._fail_open_calls)

    def wait_until_loaded(self, timeout_s: float | None = None) -> Ready:
        """Wait for the first process to import the user's file; raises the reason if it could not.

        Raises a TimeoutError after `timeout_s`, which leaves the pool as it is.
        """
        error = self._ready.exception(timeout_s)
        if error is not None:
            raise error  # here, so that commands see that this package raised it, see `raised_by_us`
        return self._ready.result()

    def submit(self, calls: list[Call]) -> None:
        self._open.update(calls)
        self._thread.call(self._enqueue, calls)

    def close(self) -> None:
        """Kill every process and fail the open calls. Safe to call twice."""
        self._thread.close()

    # Everything below runs on the pool's own thread.

    def _fail_open_calls(self, reason: Exception) -> None:
        for call in list(self._open):
            call.is_broken = True
            call.failures.append(Failure(type(reason), str(reason)))
            self._finish(call)
        if not self._ready.done():
            self._ready.set_exception(reason)

    async def _keep_process(self) -> None:
        """Start a process, hand it calls until it ends, and start the next one."""
        suspects: deque[Call] = deque()
        while True:
            process = RewardProcess(self._serve, suspects)
            self._processes.append(process)
            try:
                await run_together(process.watch(), self._work(process))
            except ProcessEndedError as end:
                self._settle(process, end)
            finally:
                self._processes.remove(process)
                process.close()

    async def _work(self, process: "RewardProcess") -> None:
        ready = await self._load(process)
        while process.suspects:
            await self._score(process, process.suspects.popleft())
        num_calls = self.config.max_concurrency if ready.is_async else 1
        await run_together(*(self._score_queued(process) for _ in range(num_calls)))

    async def _load(self, process: "RewardProcess") -> Ready:
        limit_s = max(LOAD_TIMEOUT_S, self.config.timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                message = await process.ready()
        except TimeoutError:
            where = _where_it_hangs(await process.child.stacks(), self.path)
            why = f"`{OPTION}`: importing {self.path} took over {limit_s:g} s: {where}"
            message = Failure(TimeoutError, why)
        if isinstance(message, Failure):
            raise PoolBrokenError(message.kind(message.message))
        process.is_loaded, process.pid = True, message.pid
        process.grace_s = LATE_GRACE_S if message.is_async else 0.0
        if not self._ready.done():
            self._ready.set_result(message)
        return message

    async def _score_queued(self, process: "RewardProcess") -> None:
        while True:
            _, _, call = await self._queue.get()
            await self._score(process, call)

    async def _score(self, process: "RewardProcess", call: Call) -> None:
        if call.batch.is_cancelled.is_set():
            self._open.discard(call)
            return
        timeout_s = self.config.timeout_s
        process.calls.append(call)
        try:
            async with asyncio.timeout(timeout_s + process.grace_s):
                answer = await process.ask(call.payload)
        except TimeoutError:
            where = _where_it_hangs(await process.child.stacks(), self.path)
            raise HungError(timeout_message(self.function, timeout_s, where)) from None
        process.num_answers += 1
        if answer.is_memory_full and (len(process.calls) > 1 or process.num_answers > 1):
            raise ShortOfMemoryError("is short of memory")  # other calls may have filled it
        process.calls.remove(call)
        if answer.failure is None:
            call.scores = answer.scores
            call.batch.has_scores = True
            self._hopeless.clear()
            self._finish(call)
        else:
            self._fail(process, call, answer.failure)
        if answer.is_memory_full:
            raise ShortOfMemoryError("is short of memory")

    def _settle(self, process: "RewardProcess", end: ProcessEndedError) -> None:
        """Decide what becomes of the calls of a process that ended."""
        how, report = str(end), f"\n{end.report}" if end.report else ""
        if end.exit_code is not None and end.exit_code >= 0:
            how += " (did the function call `exit`?)"
        if not process.is_loaded:
            message = f"`{OPTION}`: the process that imports {self.path} {how}{report}"
            raise PoolBrokenError(RuntimeError(message))
        calls = process.calls
        if isinstance(end, ShortOfMemoryError) or len(calls) > 1:
            for call in calls:
                call.is_suspect = True
            process.suspects.extendleft(reversed(calls))
        elif not calls:
            logger.warning("an idle reward process %s and is replaced: pid=%d", how, process.pid)
        else:
            what, kind = describe(calls[0].rows, calls[0].inputs), TimeoutError
            if not isinstance(end, HungError):
                how = f"the process of reward function {self.function} {how} while it scored"
                kind = RuntimeError
            self._fail(process, calls[0], Failure(kind, f"{how} {what}{report}"))

    def _fail(self, process: "RewardProcess", call: Call, failure: Failure) -> None:
        """Repeat a call that failed, or give it up."""
        call.failures.append(failure)
        # A call that hung is repeated before all others: if the function always hangs, the run ends after two
        # time limits. Other calls are repeated after those waiting, when the cause may have passed.
        is_first = failure.kind is TimeoutError
        if self.config.on_failure != "error" and not call.batch.has_scores:
            is_first = False  # other calls say sooner whether any can succeed
            self._check_hope(call, failure)
        if len(call.failures) > self.config.max_retries:
            if self.config.on_failure == "error":
                call.batch.is_cancelled.set()
            self._finish(call)
        elif not call.is_suspect:
            self._enqueue([call], priority=0 if is_first else 1)
        elif is_first:
            process.suspects.appendleft(call)
        else:
            process.suspects.append(call)

    def _check_hope(self, call: Call, failure: Failure) -> None:
        """End the run if every call hangs or dies: each would cost a time limit or a new process."""
        if failure.kind is ValueError or len(call.failures) > 1:
            return
        self._hopeless.append(call)
        if len(self._hopeless) < HOPELESS:
            return
        message = (
            f"the reward function hung or died in {HOPELESS} of {HOPELESS} calls, and no call of their batch"
            " succeeded: `worker.reward.on_failure` and `worker.reward.max_failure_ratio` are for single"
            f" failures. The last one: {failure.message}"
        )
        raise PoolBrokenError(RuntimeError(message))

    def _finish(self, call: Call) -> None:
        self._open.discard(call)
        call.batch.finished.put(call)

    def _enqueue(self, calls: list[Call], priority: int = 1) -> None:
        for call in calls:
            self._queue.put_nowait((priority, next(self._order), call))


class RewardProcess(ServingProcess):
    """A reward process, from its start to its end."""

    def __init__(self, serve: Serve, suspects: deque[Call]) -> None:
        super().__init__(ChildProcess.start(serve))
        self.pid = self.child.pid  # of its guardian until the function is loaded
        self.calls: list[Call] = []  # not answered yet
        self.suspects = suspects  # calls to repeat one at a time, before any other
        self.num_answers = 0
        self.is_loaded = False
        self.grace_s = 0.0  # that a call may take beyond its time limit


class HungError(ProcessEndedError):
    """A call took too long; the message says where it is."""


class ShortOfMemoryError(ProcessEndedError):
    """A process may have been filled by other calls than that which failed."""


def _where_it_hangs(stacks: str, path: str) -> str:
    """Find the user's line in the stacks that faulthandler wrote, innermost frame first."""
    frames = frames_of(stacks)
    if not frames:
        return "its process does not say where it is"
    innermost = next((idx for idx, (file, _, _) in enumerate(frames) if file == path), None)
    if innermost is None:
        return f"its process is outside of {path}\n{stacks}"
    own = os.path.dirname(__file__)
    theirs = [*frames[:innermost], *takewhile(lambda frame: not frame[0].startswith(own), frames[innermost:])]
    trace = [f'  File "{file}", line {line}, in {name}' for file, line, name in reversed(theirs)]
    file, line, name = frames[innermost]
    return "\n".join([f"it is at {file}:{line}, in {name}", TRACEBACK_HEADING, *trace])
