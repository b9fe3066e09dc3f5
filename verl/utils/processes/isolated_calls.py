# SPDX-License-Identifier: Apache-2.0
"""Calls of a function in a child process."""

import os
import pickle
import resource
import signal
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from verl.utils.processes.child_process import ChildEndedError, ChildProcess, offer_to_kill
from verl.utils.processes.fork_server import Start, fork

A = TypeVar("A")
R = TypeVar("R")


class IsolatedCalls(Generic[A, R]):
    """Calls a function in a child process, so that a crash or a hang costs one call.

    The process serves further calls and dies with this object or with this process. After a call that ends it
    or takes too long, the next call starts another. A fork of this process gets its own child.

    Args:
        function: Takes and returns one value that can be pickled.
        timeout_s: Limit of a call; None means no limit.
        enter: Called once in each new process, before its first call.
        retry: Call once more in another process if one ends: memory may have run out because of others.
        start: Starts a process. Only `ChildProcess.fork` takes a function that cannot be pickled; it is for
            processes with a single thread.
    """

    def __init__(
        self,
        function: Callable[[A], R],
        timeout_s: float | None,
        enter: Callable[[], None] | None = None,
        start: Start = fork,
        retry: bool = False,
    ) -> None:
        self.function, self.timeout_s, self.enter, self.retry = function, timeout_s, enter, retry
        self._start_child = start
        self._child: ChildProcess | None = None

    def __call__(self, argument: A) -> R:
        """Call the function in the child and wait for its result.

        Raises:
            ValueError: The function raised it, or memory ran out.
            RuntimeError: The function raised another error; the message is its traceback.
            ChildEndedError: The process ended during the call.
            TimeoutError: There was no result within `timeout_s`.
        """
        content = pickle.dumps(argument)
        try:
            answer = self._ask(content)
        except ChildEndedError:
            if not self.retry:
                raise
            answer = self._ask(content)
        result, raised = pickle.loads(answer)
        if raised is not None:
            kind, text = raised
            raise kind(text)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return IsolatedCalls, (self.function, self.timeout_s, self.enter, self._start_child, self.retry)

    def close(self) -> int:
        """End the process and return its exit code; the next call starts another."""
        if self._child is None:
            return 0
        self._child = None
        return self._finalizer() or 0

    def _ask(self, argument: bytes) -> bytes:
        connection = self.start().connection
        try:
            connection.send_bytes(argument)
            if connection.poll(self.timeout_s):
                return connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise ChildEndedError(self.close()) from error
        except BaseException:
            self.close()  # a late answer would be taken for that of the next call
            raise
        self.close()
        raise TimeoutError(f"did not end within {self.timeout_s:g} s")

    def start(self) -> ChildProcess:
        """Return the process, which is started if it is not there."""
        child = self._child
        # Between calls only the end can be read: of a process that was killed while idle.
        if child is not None and (child.parent_pid != os.getpid() or child.connection.poll()):
            self.close()
        if self._child is None:
            child = self._start_child(partial(_serve_calls, self.function, self.enter))
            self._finalizer = weakref.finalize(self, child.kill)  # before an interrupt
            self._child = child
        return self._child


# Everything below runs in the child.


def _serve_calls(
    function: Callable[[Any], Any], enter: Callable[[], None] | None, connection: Connection
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal's reach every process
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # writing the image of a large process takes long
    offer_to_kill()
    if enter is not None:
        enter()
    with suppress(EOFError, ConnectionError):  # the parent has closed its end
        while True:
            connection.send_bytes(_answer(function, connection.recv_bytes()))


def _answer(function: Callable[[Any], Any], argument: bytes) -> bytes:
    """Pickle what the function returns, or the kind and text of what it raises."""
    try:
        return pickle.dumps((function(pickle.loads(argument)), None))
    except ValueError as error:
        return pickle.dumps((None, (ValueError, str(error))))
    except MemoryError as error:
        return pickle.dumps((None, (ValueError, f"memory ran out: {error}")))
    except Exception:  # noqa: BLE001 (raised again by the caller)
        return pickle.dumps((None, (RuntimeError, traceback.format_exc())))
