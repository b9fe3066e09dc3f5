# SPDX-License-Identifier: Apache-2.0
"""The inside of a reward process: load the function once, then answer calls.

It imports neither torch nor Ray, so it starts as fast as Python does. Messages on the connection:

    in    (number, pickled (rows, inputs)) for each call
    out   (0, Ready or Failure), once; then (number, Answer) for each call, in any order if the function is
          `async def`
"""

import asyncio
import os
import pickle
import resource
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from verl.rewards.function import (
    BadScoresError,
    RewardFunction,
    Scores,
    describe,
    describe_error,
    describe_place,
    load_reward_function,
    timeout_message,
)
from verl.rewards.servers import Specs

Inputs = list[dict[str, Any]]

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # the pool is the parallelism
GIB = 1 << 30
SCARCE = 0.5  # share of its memory limit above which a process that failed is replaced: it may leak


class Ready(NamedTuple):
    """The function is loaded."""

    name: str
    reward_type: str
    is_async: bool
    pid: int
    note: str | None


class Failure(NamedTuple):
    """An error, as the exception that the controller raises."""

    kind: type[Exception]
    message: str


class Answer(NamedTuple):
    """The result of a call: scores or a failure."""

    scores: list[Scores] | None
    failure: Failure | None
    is_memory_full: bool = False  # the process should be replaced


def serve(
    spec: str,
    kwargs: dict[str, Any],
    default_type: str,
    timeout_s: float,
    memory_limit_gb: float | None,
    servers: Specs,
    connection: Connection,
) -> None:
    """Load the function `spec` (path.py:function) and answer calls until the connection closes."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    memory = MemoryLimit(memory_limit_gb)
    memory.set()
    try:
        reward = load_reward_function(spec, kwargs, default_type, servers)
    except (ValueError, OSError) as error:
        memory.lift()
        connection.send((0, Failure(type(error), f"{error}{memory.hint(error.__cause__)}")))
        return
    connection.send((0, Ready(reward.name, reward.reward_type, reward.is_async, os.getpid(), reward.note)))
    worker = RewardWorker(connection, reward, memory, timeout_s)
    if reward.is_async:
        asyncio.run(worker.serve_concurrently())
    else:
        worker.serve()


class RewardWorker:
    """Answers calls of a loaded reward function."""

    def __init__(
        self, connection: Connection, reward: RewardFunction, memory: "MemoryLimit", timeout_s: float
    ) -> None:
        self.connection, self.reward, self.memory, self.timeout_s = connection, reward, memory, timeout_s

    def serve(self) -> None:
        while True:
            try:
                number, payload = self.connection.recv()
            except EOFError:
                return
            rows, inputs = [], []
            try:
                rows, inputs = pickle.loads(payload)
                scores = self.reward.check(self.reward.call(inputs), rows, inputs)
                answer = Answer(scores, None)
            except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's function raises anything)
                answer = self._failed(error, rows, inputs)
            self.connection.send((number, answer))

    async def serve_concurrently(self) -> None:
        """Run every call that has arrived at the same time; the pool bounds their number."""
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

        def read() -> None:  # in a thread, so that the pool can send while the user's code blocks the loop
            while True:
                try:
                    message = self.connection.recv()
                except EOFError:
                    os._exit(0)
                loop.call_soon_threadsafe(messages.put_nowait, message)

        threading.Thread(target=read, daemon=True).start()
        async with asyncio.TaskGroup() as calls:
            while True:
                calls.create_task(self._answer_async(*await messages.get()))

    async def _answer_async(self, number: int, payload: bytes) -> None:
        rows, inputs = [], []
        limit = asyncio.timeout(self.timeout_s)
        try:
            rows, inputs = pickle.loads(payload)
            async with limit:
                returned = await self.reward.call_async(inputs)
            answer = Answer(self.reward.check(returned, rows, inputs), None)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's function raises anything)
            if limit.expired() and isinstance(error, TimeoutError):
                place = describe_place(error.__cause__ or error, self.reward.path)
                message = timeout_message(str(self.reward), self.timeout_s, f"it is{place}")
                failure = Failure(TimeoutError, f"{message} {describe(rows, inputs)}")
                answer = Answer(None, failure)
            else:
                answer = self._failed(error, rows, inputs)
        self.connection.send((number, answer))

    def _failed(self, error: BaseException, rows: list[int], inputs: Inputs) -> Answer:
        if isinstance(error, BadScoresError):
            return Answer(None, Failure(ValueError, str(error)))
        is_full = self.memory.is_scarce(error)
        self.memory.lift()  # describing the error takes memory
        what = describe_error(error, self.reward.path) + self.memory.hint(error)
        self.memory.set()
        if rows:
            message = f"reward function {self.reward} raised {what}for {describe(rows, inputs)}"
        else:
            message = f"a reward process cannot read the inputs of {self.reward}: {what}"
        return Answer(None, Failure(ValueError, message), is_full)


class MemoryLimit:
    """Limit of the memory that this process allocates, not counting mapped files and shared memory."""

    # The kernel's limit, `RLIMIT_DATA`, holds inside one endless statement too, and children inherit it.

    def __init__(self, limit_gb: float | None) -> None:
        self.limit_gb = limit_gb
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self._soft if limit_gb is None else int(limit_gb * GIB)
        self._limit = limit if self._hard == resource.RLIM_INFINITY else min(limit, self._hard)

    def set(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self._limit, self._hard))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self._soft, self._hard))

    def is_scarce(self, error: BaseException) -> bool:
        """Return whether the process should take no more calls after this error."""
        if self.limit_gb is None or isinstance(error, MemoryError):
            return isinstance(error, MemoryError)
        with open("/proc/self/statm") as file:
            data_pages = int(file.read().split()[5])  # counted as `RLIMIT_DATA` does, plus the stack
        return data_pages * resource.getpagesize() > SCARCE * self.limit_gb * GIB

    def hint(self, error: BaseException | None) -> str:
        """Name the option behind an error that the limit caused."""
        if self.limit_gb is None or not isinstance(error, MemoryError):
            return ""
        return f"the process may allocate `worker.reward.memory_limit_gb` ({self.limit_gb:g} GiB)\n"
