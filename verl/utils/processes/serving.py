# SPDX-License-Identifier: Apache-2.0
"""Pools of child processes: requests, their answers, and the thread of a pool.

A pool is a coroutine on a `ServingThread`, and each of its processes a `ServingProcess`. What becomes of a
request whose process hangs, ends or is killed is the pool's to say.
"""

import asyncio
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from verl.utils.processes.child_process import ChildProcess

SIZE, LONG_SIZE = struct.Struct("!i"), struct.Struct("!iQ")  # of a message, as `Connection` sends it
MAX_ANSWER = 64 << 20  # bytes; the scores of 100,000 responses have some 10 MiB
EXIT_WAIT_S = 3.0  # between the end of its connection and that of a process
EXIT_POLL_S = 0.01

T = TypeVar("T")


class PoolBrokenError(Exception):
    """A pool has ended for good; `reason` is raised where it is used."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class ProcessEndedError(Exception):
    """A process ended before it answered; the message begins with a verb, as "was killed by SIGSEGV"."""

    def __init__(self, how: str, exit_code: int | None = None, report: str = "") -> None:
        super().__init__(how)
        self.exit_code = exit_code  # None if it had to be killed
        self.report = report  # what Python wrote when it crashed


def taken(queue: SimpleQueue[T], timeout_s: float) -> list[T]:
    """Return what is in a queue, in order; wait for the first entry for at most `timeout_s`."""
    found: list[T] = []
    with suppress(Empty):
        found.append(queue.get(timeout=timeout_s))
        while True:
            found.append(queue.get_nowait())
    return found


class ServingThread:
    """The thread of a pool, which lives as long as the pool.

    Linux kills a child when the *thread* that started it ends: no process outlives a controller that was
    killed.

    Args:
        name: Names the pool in errors.
        main: Runs until it raises or is cancelled.
        at_end: Called in the thread after that, with the reason.
    """

    def __init__(
        self, name: str, main: Coroutine[Any, Any, None], at_end: Callable[[Exception], None]
    ) -> None:
        self.name, self._at_end = name, at_end
        self.ended: Exception | None = None  # the reason
        self._lock = threading.Lock()  # guards the end of the loop
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(main)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the thread; raises the reason if the pool has ended."""
        with self._lock:
            if self.ended is not None:
                raise type(self.ended)(str(self.ended))
            self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Cancel the coroutine, and wait for its end. Safe to call twice."""
        with self._lock:
            if self.ended is None:
                self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def _run(self) -> None:
        ended: Exception = RuntimeError(f"{self.name} was closed")
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
        except PoolBrokenError as error:
            ended = error.reason
        except BaseException as error:
            ended = RuntimeError(f"{self.name} stopped: {error!r}")
            raise
        finally:
            with self._lock:
                self.ended = ended
            self._loop.run_until_complete(_cancel(asyncio.all_tasks(self._loop)))
            self._loop.close()
            self._at_end(ended)


class ServingProcess:
    """A child process that answers requests, as an event loop sees it: one that stops holds up no other.

    It reads (number, request) and writes (number, answer), in any order. Under the number 0 it may write
    something of its own, when it is ready.
    """

    def __init__(self, child: ChildProcess) -> None:
        self._loop = asyncio.get_running_loop()
        self.child, self.is_closed = child, False
        self._socket = socket.socket(fileno=os.dup(child.connection.fileno()))
        self._socket.setblocking(False)
        self._sending = asyncio.Lock()
        self._answers = {0: self._loop.create_future()}
        self._numbers = count(1)
        self._end = self._loop.create_task(self._read())

    async def ready(self) -> Any:
        """Wait for what it writes when it is ready; raises a `ProcessEndedError` if it ends before."""
        return await self._answers[0]

    async def ask(self, request: Any) -> Any:
        """Send a request and wait for its answer; raises a `ProcessEndedError` if the process ends before."""
        number = next(self._numbers)
        message = pickle.dumps((number, request))
        answer = self._answers[number] = self._loop.create_future()
        await self._send(message)
        if self._end.done():
            raise self._end.result()
        return await answer

    async def watch(self) -> None:
        """Wait for the end of the process, which is raised as a `ProcessEndedError`."""
        raise await asyncio.shield(self._end)

    def has_ended(self) -> bool:
        """Return whether it has ended; asked when it has no request to answer."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return self._end.done() or bool(poll.poll(0))

    def close(self) -> None:
        """Kill the process unless it has ended. Safe to call twice."""
        if not self.is_closed:
            self.is_closed = True
            self._end.cancel()
            self._socket.close()
            self.child.kill()

    async def _send(self, message: bytes) -> None:
        size = len(message)
        with suppress(OSError):  # it has ended, as is read
            async with self._sending:
                head = SIZE.pack(size) if size < 1 << 31 else LONG_SIZE.pack(-1, size)
                await self._loop.sock_sendall(self._socket, head)
                await self._loop.sock_sendall(self._socket, message)

    async def _read(self) -> ProcessEndedError:
        try:
            with suppress(EOFError, OSError):
                while True:
                    await self._read_answer()
                    await asyncio.sleep(0)  # whoever waits for it has it before the end is seen
            end = await self._ending()
        except ProcessEndedError as error:
            end = error
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(end)
                answer.exception()  # else it is logged if no one waits for it
        return end

    async def _read_answer(self) -> None:
        (size,) = SIZE.unpack(await self._receive(SIZE.size))
        if not 0 <= size <= MAX_ANSWER:
            raise ProcessEndedError(f"sent a message of more than {MAX_ANSWER >> 20} MiB")
        message = await self._receive(size)
        try:
            number, answer = pickle.loads(message)
            waiting = self._answers[0] if number == 0 else self._answers.pop(number, None)
        except Exception as error:  # a user's function wrote to the connection
            raise ProcessEndedError(f"sent a message that cannot be read ({error!r:.200})") from error
        if waiting is not None and not waiting.done():  # else a fork of the process answered too
            waiting.set_result(answer)

    async def _receive(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            part = await self._loop.sock_recv(self._socket, min(size - len(content), 1 << 20))
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    async def _ending(self) -> ProcessEndedError:
        try:
            async with asyncio.timeout(EXIT_WAIT_S):
                while not self.child.has_ended():
                    await asyncio.sleep(EXIT_POLL_S)
        except TimeoutError:
            return ProcessEndedError("stopped answering")
        how = self.child.describe_end()
        return ProcessEndedError(how, self.child.exit_code, self.child.crash_report())


async def run_together(*works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one raises, then cancel the others and raise its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
