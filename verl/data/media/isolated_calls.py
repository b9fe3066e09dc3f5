# SPDX-License-Identifier: Apache-2.0
"""Calls of a function in a process of its own, which may crash or hang and takes nothing else down.

Decoders are written in C: a damaged file can end the process that reads it, or keep it for ever, and no
`except` sees it. Called through `IsolatedCalls` such a file costs a process that holds nothing.
"""

import contextlib
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from verl.utils.parent_process import end_with_parent
from verl.utils.rank_logger import get_logger

A = TypeVar("A")
R = TypeVar("R")
FIRST_TO_KILL = "1000"

logger = get_logger(__name__, all_ranks=True)


class Helper(NamedTuple):
    """The process that runs the function, as its parent sees it."""

    pid: int
    connection: Connection
    parent_pid: int


class Answer(NamedTuple):
    """What the function returned, or the kind and text of what it raised."""

    result: Any
    raised: tuple[type[Exception], str] | None


class IsolatedCalls(Generic[A, R]):
    """Calls a function in another process, one call at a time.

    The process is forked by the first call, so that it starts in milliseconds and has what this process has
    opened. It stays for the calls that follow, and ends with this object or with this process. A call that
    ends it or takes too long fails alone: the next one forks a new process. A process that is itself forked
    from this one gets a helper of its own.

    Example::

        size_of = IsolatedCalls(decode_and_measure, timeout_s=300)
        try:
            height, width = size_of("picture.png")
        except (ChildProcessError, TimeoutError) as error:
            ...  # "was ended by SIGSEGV"

    Args:
        function: Its argument and its result travel by pickle: arrays and plain values are cheap.
        timeout_s: Seconds that a call may take; None is without limit.
        enter: Called once in each new process, before the first call.
    """

    def __init__(
        self, function: Callable[[A], R], timeout_s: float | None, enter: Callable[[], None] | None = None
    ) -> None:
        self.function, self.timeout_s, self.enter = function, timeout_s, enter
        self._helper: Helper | None = None

    def __call__(self, argument: A) -> R:
        """Call the function in the other process and wait for its result.

        Raises:
            ValueError: The function raised it, or memory ran out.
            RuntimeError: The function raised something else; the message is its traceback.
            ChildProcessError: The process ended during the call; the message says how.
            TimeoutError: There was no result within `timeout_s`; the process is killed.
        """
        answer: Answer = pickle.loads(self._ask(pickle.dumps(argument)))
        if answer.raised is not None:
            kind, text = answer.raised
            raise kind(text)
        return answer.result

    def close(self) -> None:
        """End the process; the next call forks another."""
        self._end_helper()

    def _ask(self, argument: bytes) -> bytes:
        connection = self._living_helper().connection
        is_answered = False
        try:
            connection.send_bytes(argument)
            if not connection.poll(self.timeout_s):
                raise TimeoutError(f"did not end within {self.timeout_s:g} s")
            answer = connection.recv_bytes()
            is_answered = True
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise ChildProcessError(_ending(self._end_helper())) from error
        finally:
            if not is_answered:  # an answer that still came would be taken for that of the next call
                self._end_helper()
        return answer

    def _living_helper(self) -> Helper:
        helper = self._helper
        # Between calls nothing can be read but the end: of a process that was killed while it had no work.
        if helper is not None and (helper.parent_pid != os.getpid() or helper.connection.poll()):
            self._end_helper()
        if self._helper is None:
            self._helper = helper = _fork(self.function, self.enter)
            self._finalizer = weakref.finalize(self, _end, helper)
        return self._helper

    def _end_helper(self) -> int:
        """End the process if there is one; returns how it ended, as `os.waitpid` says it."""
        if self._helper is None:
            return 0
        self._helper = None
        return self._finalizer() or 0


def _fork(function: Callable[[Any], Any], enter: Callable[[], None] | None) -> Helper:
    ours, theirs = multiprocessing.Pipe()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(function, enter, theirs, parent_pid)
    theirs.close()
    return Helper(pid, ours, parent_pid)


def _end(helper: Helper) -> int:
    helper.connection.close()
    if helper.parent_pid != os.getpid():
        return 0  # the helper of the process that this one was forked from
    os.kill(helper.pid, signal.SIGKILL)  # does nothing to one that has ended: it was not waited for yet
    return os.waitpid(helper.pid, 0)[1]


def _ending(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exited with status {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    hint = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(number).name}{hint}"


# --- in the helper's process


def _serve(
    function: Callable[[Any], Any], enter: Callable[[], None] | None, connection: Connection, parent_pid: int
) -> NoReturn:
    status = 1
    try:
        _depend_on(parent_pid)
        if enter is not None:
            enter()
        while True:
            connection.send_bytes(_answer(function, connection.recv_bytes()))
    except (EOFError, ConnectionError):
        status = 0  # the parent wants nothing more
    except Exception:
        logger.exception("a process for isolated calls cannot go on")
    finally:
        os._exit(status)  # what the parent would do at its own end is not done here


def _depend_on(parent_pid: int) -> None:
    """Die with the parent, and only with it; of all processes be the first to go when memory runs out."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C goes to all, and is not the fault of a call
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the image of a large process takes long to write
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # some containers have no such file
            Path("/proc/self/oom_score_adj").write_text(FIRST_TO_KILL)
    end_with_parent(parent_pid)


def _answer(function: Callable[[Any], Any], argument: bytes) -> bytes:
    try:
        return pickle.dumps(Answer(function(pickle.loads(argument)), None))
    except ValueError as error:
        return pickle.dumps(Answer(None, (ValueError, str(error))))
    except MemoryError as error:
        return pickle.dumps(Answer(None, (ValueError, f"memory ran out: {error}")))
    except Exception:  # noqa: BLE001 - raised again where the call was made
        return pickle.dumps(Answer(None, (RuntimeError, traceback.format_exc())))
