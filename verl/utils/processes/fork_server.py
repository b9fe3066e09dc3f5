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
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import IO, Any

from verl.utils.processes.child_process import (
    ChildEndedError,
    ChildProcess,
    Serve,
    become_child,
    has_ended,
    run_forked,
)

FORK, ENDED, END = "fork", "ended", "end"  # requests to a server
STATE = "state"  # stands for the state of a server in what is sent to it
THREAD_OPTIONS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
JEMALLOC = "jemalloc_bg_thd\n"  # the name of its thread
START_LIMIT_S = 900.0  # for a server to import modules and to load its state
ANSWER_LIMIT_S = 60.0  # for its further answers
Start = Callable[[Serve], ChildProcess]


def fork(serve: Serve) -> ChildProcess:
    """Fork this process if it has a single thread, else the shared server, which `serve` is pickled for."""
    return ChildProcess.fork(serve) if num_threads() == 1 else shared_server(os.getpid()).fork(serve)


def num_threads() -> int:
    """Count the threads of this process, with those of native libraries that do not know about forks."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            names.append(path.read_text())
    return len(names) - names.count(JEMALLOC)


@cache
def shared_server(pid: int) -> "ForkServer":
    """Return the server of a process; a fork of the process gets another one."""
    return ForkServer()


class ForkServer:
    """A process without threads whose children share the memory of a state.

    A server that has ended is replaced at the next fork; its children have ended with it.

    Args:
        state: Pickled once, when the server starts. What is forked may refer to it, or to its methods.
        start: Starts the server: as a fresh interpreter, or as the child of another server.
        name: Names the server in errors.
        guarded: Its children have guardians and write stacks, as fresh interpreters do.
    """

    def __init__(
        self,
        state: Any = None,
        start: Start | None = None,
        name: str = "the process that forks others",
        *,
        guarded: bool = False,
    ) -> None:
        self.name, self.guarded = name, guarded
        self._state, self._start_server = state, start or start_in_lasting_thread
        self._server: ChildProcess | None = None
        self._lock, self._owner = threading.Lock(), 0
        self._has_answered = False

    def start(self) -> ChildProcess:
        """Return the server, which is started if it is not there."""
        with self._lock:
            return self._living_server()

    def fork(self, serve: Serve) -> "ServedChild":
        """Start a child that runs `serve(connection)`.

        Raises:
            ChildEndedError: The server ended.
            RuntimeError: It cannot load `serve`, or does not answer in time.
        """
        request = _dumps(serve, self._state)
        with self._lock:
            self._owner = threading.get_ident()
            try:
                return self._fork(self._living_server(), request)
            finally:
                self._owner = 0

    def ask(self, server: ChildProcess, kind: str, pid: int) -> Any:
        """Ask for the end of a child, or whether it has ended; None if the server has, and they with it."""
        if self._owner == threading.get_ident():
            return None  # garbage is collected during a request; the child ends as its connection closes
        with self._lock, suppress(EOFError, OSError, RuntimeError):
            return self._ask(server, kind, pid)
        return None

    def close(self) -> None:
        """End the server and its children."""
        if self._server is not None:
            self._server.kill()

    def _living_server(self) -> ChildProcess:
        server = self._server
        # Between requests there is nothing to read but the end of the server.
        if server is None or server.exit_code is not None or server.connection.poll():
            if server is not None:
                server.kill()
            self._has_answered = False
            self._server = self._start_server(_Server(self._state, self.guarded))
        assert self._server is not None
        return self._server

    def _fork(self, server: ChildProcess, request: bytes) -> "ServedChild":
        try:
            pid, error = self._ask(server, FORK, request)
            if error is not None:
                raise error
            connection = Connection(recv_handle(server.connection))
            report = os.fdopen(recv_handle(server.connection), "rb") if self.guarded else None
        except (EOFError, OSError) as error:
            raise ChildEndedError(server.kill()) from error
        return ServedChild(self, server, pid, connection, report)

    def _ask(self, server: ChildProcess, kind: str, value: Any) -> Any:
        server.connection.send((kind, value))
        limit_s = ANSWER_LIMIT_S if self._has_answered else START_LIMIT_S
        if not server.connection.poll(limit_s):
            server.kill()
            raise RuntimeError(f"{self.name} did not answer within {limit_s:g} s")
        self._has_answered = True
        return server.connection.recv()


class ServedChild(ChildProcess):
    """A child of a server, as the process sees it for which it was forked."""

    def __init__(
        self,
        forks: ForkServer,
        server: ChildProcess,
        pid: int,
        connection: Connection,
        report: IO[bytes] | None,
    ) -> None:
        super().__init__(pid, connection, lambda: 0, report)
        self._forks, self._server = forks, server
        self._is_lost = False  # its server has ended

    def has_ended(self) -> bool:
        if self.exit_code is not None:
            return True
        has_ended = self._forks.ask(self._server, ENDED, self.pid)
        self._is_lost = has_ended is None
        return has_ended is not False

    def describe_end(self) -> str:
        how = super().describe_end()
        return f"ended with {self._forks.name}" if self._is_lost else how

    def _end(self) -> int:
        exit_code = self._forks.ask(self._server, END, self.pid)
        return -signal.SIGKILL if exit_code is None else exit_code


def start_in_lasting_thread(serve: Serve) -> ChildProcess:
    """Start a fresh interpreter that dies with this process and not with the calling thread."""
    started: Future[ChildProcess] = Future()

    def start() -> None:
        try:
            started.set_result(ChildProcess.start(serve))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            started.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=start, name="fork server", daemon=True).start()
    return started.result()


# Everything below runs in the server, but for `_dumps`.


class _Server:
    """Forks on request. The state is unpickled where it serves, the modules of it where it is unpickled."""

    def __init__(self, state: Any, guarded: bool) -> None:
        self.state, self.guarded = pickle.dumps(state), guarded
        self.module = __name__ if state is None else type(state).__module__

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        for name in THREAD_OPTIONS:
            os.environ[name] = "1"  # else numpy starts threads when it is imported
        import_module(self.module)  # once, in the server that forks this one

    def __call__(self, connection: Connection) -> None:
        state = pickle.loads(self.state)
        self.state = b""
        ending: set[int] = set()  # children that are killed by their guardians
        with suppress(EOFError, ConnectionError):  # the process has closed its end
            while True:
                kind, value = connection.recv()
                ending = {pid for pid in ending if os.waitpid(pid, os.WNOHANG)[0] == 0}
                if kind == FORK:
                    _fork_for(connection, value, state, self.guarded)
                elif kind == ENDED:
                    connection.send(has_ended(value))
                elif has_ended(value) or not self.guarded:
                    os.kill(value, signal.SIGKILL)
                    connection.send(os.waitstatus_to_exitcode(os.waitpid(value, 0)[1]))
                else:  # whatever it does to its guardian, this process does not wait
                    for number in (signal.SIGTERM, signal.SIGCONT):
                        os.kill(value, number)
                    ending.add(value)
                    connection.send(-signal.SIGKILL)


def _fork_for(connection: Connection, request: bytes, state: Any, guarded: bool) -> None:
    try:
        serve = _loads(request, state)
    except Exception as error:  # noqa: BLE001 - raised by the process that asked
        connection.send((0, RuntimeError(f"cannot start a process: {type(error).__name__}: {error}")))
        return
    report = tempfile.TemporaryFile() if guarded else None  # noqa: SIM115 (closed below)
    ours, theirs = Pipe()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        connection.close()
        ours.close()
        del ours
        run_forked(serve if report is None else partial(_guard, serve, report, server), theirs, server)
    theirs.close()
    connection.send((pid, None))
    for file in (ours, report):
        if file is not None:
            send_handle(connection, file.fileno(), None)
            file.close()


def _guard(serve: Serve, report: IO[bytes], server: int, connection: Connection) -> None:
    serve(become_child(connection.fileno(), report.fileno(), server))


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
