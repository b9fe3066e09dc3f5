# SPDX-License-Identifier: Apache-2.0
"""Fork processes from one that has no threads.

A fork copies the thread that calls it and no other. A lock that another thread holds at that moment, of libc,
of a native library or of Python, stays locked in the child forever. A process with threads asks a server to
fork for it, which has none (but jemalloc's in pyarrow, which knows about forks).
"""

import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from verl.utils.processes.child_process import ChildProcess, Serve, run_forked
from verl.utils.user_file import import_again, imported_files

FORK, END = "fork", "end"  # requests to a server
STATE = "state"  # stands for the state of a server in what is sent to it
THREAD_OPTIONS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
Start = Callable[[Serve], ChildProcess]


def fork(serve: Serve) -> ChildProcess:
    """Fork this process if it has a single thread, else the shared server, which `serve` is pickled for."""
    return ChildProcess.fork(serve) if num_threads() == 1 else shared_server(os.getpid()).fork(serve)


def num_threads() -> int:
    """Count the threads of this process, those of native libraries included."""
    if sys.platform == "linux":
        return len(list(Path("/proc/self/task").iterdir()))
    return threading.active_count()


@cache
def shared_server(pid: int) -> "ForkServer":
    """Return the server of a process; a fork of the process gets another one."""
    return ForkServer()


class ForkServer:
    """A process without threads whose children share the memory of a state.

    Args:
        state: Pickled once, when the server starts. What is forked may refer to it, or to its methods.
        start: Starts the server: as a fresh interpreter, or as the child of another server.
    """

    def __init__(self, state: Any = None, start: Start | None = None) -> None:
        self._state, self._start_server = state, start or start_in_lasting_thread
        self._server: ChildProcess | None = None
        self._lock, self._owner = threading.Lock(), 0

    def fork(self, serve: Serve) -> ChildProcess:
        """Start a child that runs `serve(connection)`."""
        request = _dumps(serve, self._state)
        with self._lock:
            self._owner = threading.get_ident()
            try:
                server = self._living_server()
                server.connection.send((FORK, request))
                pid, error = server.connection.recv()
                if error is not None:
                    raise error
                connection = Connection(recv_handle(server.connection))
            finally:
                self._owner = 0
        return ServedChild(pid, connection, lambda: self._end(server, pid))

    def _living_server(self) -> ChildProcess:
        server = self._server
        # Between requests there is nothing to read but the end of the server.
        if server is None or server.exit_code is not None or server.connection.poll():
            if server is not None:
                server.kill()
            self._server = self._start_server(_Server(self._state))
        assert self._server is not None
        return self._server

    def _end(self, server: ChildProcess, pid: int) -> int:
        """Kill a child and return its exit code: that of its own end, if it came before."""
        if (
            self._owner == threading.get_ident()
        ):  # garbage is collected while this thread waits for the server
            return -signal.SIGKILL  # the child ends as its connection closes
        with self._lock, suppress(EOFError, OSError):  # the server has ended, and all its children with it
            server.connection.send((END, pid))
            return server.connection.recv()
        return -signal.SIGKILL


class ServedChild(ChildProcess):
    """A child of a server, as the process sees it for which it was forked."""

    def kill(self) -> int:
        if self.exit_code is None:
            is_ours = self.parent_pid == os.getpid()
            self.connection.close()
            self.exit_code = self._reap() if is_ours else 0
        return self.exit_code


def start_in_lasting_thread(serve: Serve) -> ChildProcess:
    """Start a fresh interpreter that dies with this process and not with the calling thread."""
    started: list[ChildProcess | BaseException] = []
    is_started, never = threading.Event(), threading.Event()

    def start() -> None:
        try:
            started.append(ChildProcess.start(serve))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            started.append(error)
        is_started.set()
        never.wait()

    threading.Thread(target=start, name="fork server", daemon=True).start()
    is_started.wait()
    child = started[0]
    if isinstance(child, BaseException):
        raise child
    return child


# Everything below runs in the server, but for `_dumps`.


class _Server:
    """Forks on request. The state is unpickled where it serves, the modules of it where it is unpickled."""

    def __init__(self, state: Any) -> None:
        self.state, self.files = pickle.dumps(state), imported_files()
        self.module = type(state).__module__

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        for name in THREAD_OPTIONS:
            os.environ[name] = "1"  # else numpy starts threads when it is imported
        import_again(self.files)
        import_module(self.module)  # once, in the server that forks this one

    def __call__(self, connection: Connection) -> None:
        state = pickle.loads(self.state)
        self.state = b""
        with suppress(EOFError, ConnectionError):  # the process has closed its end
            while True:
                kind, value = connection.recv()
                if kind == END:
                    os.kill(value, signal.SIGKILL)
                    connection.send(os.waitstatus_to_exitcode(os.waitpid(value, 0)[1]))
                else:
                    _fork_for(connection, value, state)


def _fork_for(connection: Connection, request: bytes, state: Any) -> None:
    try:
        serve = _loads(request, state)
    except Exception as error:  # noqa: BLE001 - raised by the process that asked
        connection.send((0, RuntimeError(f"cannot start a process: {type(error).__name__}: {error}")))
        return
    ours, theirs = Pipe()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        connection.close()
        ours.close()
        run_forked(serve, theirs, server)
    theirs.close()
    connection.send((pid, None))
    send_handle(connection, ours.fileno(), None)
    ours.close()


def _dumps(value: Any, state: Any) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> str | None:
            return STATE if state is not None and value is state else None

    content = io.BytesIO()
    Pickler(content).dump(value)
    return content.getvalue()


def _loads(content: bytes, state: Any) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> Any:
            return state

    return Unpickler(io.BytesIO(content)).load()
