# SPDX-License-Identifier: Apache-2.0
"""Start, limit and end child processes."""

import asyncio
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NoReturn

from verl.utils.cuda_builds import CHILD_SITE, child_environment
from verl.utils.standard_streams import outlive_readers

Serve = Callable[[Connection], object]

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
STACK_SIGNAL = signal.SIGUSR1  # answered in C, even inside an endless regular expression
STACK_WAIT_S, STACK_POLL_S = 2.0, 0.02
# The main thread is written last, from the innermost frame to that of `BOOT`; a deep stack ends with dots.
STACKS_END = re.compile(r'( File "<string>", line \d+ in <module>|\.\.\.)\n\Z')
KILL_WAIT_S = 2.0  # for a guardian to end what it guards
CLEAN_LOOKS = 2  # at all processes, of which one misses a process that changes its parent at that moment
FAMILY = "VERL_PROCESS_FAMILY"  # in the environment: each fresh interpreter above a process, by its own word
GUARDED = (signal.SIGCHLD, signal.SIGTERM, STACK_SIGNAL)  # signals that a guardian waits for
FIRST_TO_KILL = "1000"  # the kernel's out-of-memory score of a process to kill before all others
# A process forked while another thread starts a program would keep open the pipe on which that thread waits
# for the program to run, and the wait would last as long as the process.
STARTING = threading.RLock()
BOOT = f"import sys; from {__name__} import _run_fresh; _run_fresh(*map(int, sys.argv[1:4]))"

os.register_at_fork(
    before=STARTING.acquire, after_in_parent=STARTING.release, after_in_child=STARTING.release
)


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux send this process a signal when its parent dies; exit now if it has died already."""
    signal_when_parent_dies(number)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def signal_when_parent_dies(number: signal.Signals) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def name_process(name: str) -> None:
    """Give this process a name of at most 15 characters, as `top` shows it."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate no more than `num_bytes` from now on."""
    with open("/proc/self/statm") as file:
        data = int(file.read().split()[5]) * resource.getpagesize()  # as `RLIMIT_DATA` counts it
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + num_bytes if hard == resource.RLIM_INFINITY else min(data + num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def offer_to_kill() -> None:
    """Have the kernel kill this process before all others when memory runs out."""
    with suppress(OSError):  # some containers have no such file
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_KILL)


def has_ended(pid: int) -> bool:
    """Return whether a child of this process has ended; it is not reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def describe_exit(exit_code: int) -> str:
    """Explain an exit code; a negative one is a signal, as in "was killed by SIGSEGV"."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    hint = ", as the kernel does when memory runs out" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name}{hint}"


class ChildEndedError(ChildProcessError):
    """A child process ended during a call; `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(describe_exit(exit_code))
        self.exit_code = exit_code


class ChildProcess:
    """A process that runs `serve(connection)`, as its parent sees it.

    It dies with the *thread* that started it, which must live as long as the process should. With a fresh
    interpreter dies all that it started, in whatever session, see `_guard`.
    """

    def __init__(
        self,
        pid: int,
        connection: Connection,
        reap: Callable[[], int],
        report: IO[bytes] | None = None,
        word: str = "",
    ) -> None:
        self.pid, self.connection = pid, connection  # a fresh interpreter's guardian
        self.parent_pid = os.getpid()
        self.exit_code: int | None = None
        self._reap, self._report, self._word = reap, report, word
        self._written = ""
        self._killing = threading.RLock()

    @classmethod
    def fork(cls, serve: Serve) -> "ChildProcess":
        """Copy this process: that takes milliseconds, and the child has everything that is loaded here."""
        ours, theirs = multiprocessing.Pipe()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            run_forked(serve, theirs, parent_pid)
        theirs.close()
        return cls(pid, ours, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    @classmethod
    def start(cls, serve: Serve) -> "ChildProcess":
        """Start a fresh interpreter, which imports only what pickle needs to load `serve`."""
        task = pickle.dumps(serve)
        ours, theirs = multiprocessing.Pipe()
        report = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `kill`)
        handles = [theirs.fileno(), report.fileno()]
        # Says in `ps` what the process does.
        label = getattr(serve, "module", None) or getattr(serve, "func", serve).__module__
        repair = [str(CHILD_SITE)] if child_environment() else []
        path = os.pathsep.join([*repair, *(entry or os.getcwd() for entry in sys.path)])
        word = uuid.uuid4().hex
        family = f"{os.environ.get(FAMILY, '')}:{word}"
        with STARTING:
            process = subprocess.Popen(
                [sys.executable, "-c", BOOT, *map(str, [*handles, os.getpid()]), label],
                stdin=subprocess.DEVNULL,
                pass_fds=handles,
                start_new_session=True,  # Ctrl-C does not reach it
                env=os.environ | {"PYTHONPATH": path, FAMILY: family},
            )
        theirs.close()
        with suppress(BrokenPipeError):  # it died at once, as its exit code says
            ours.send_bytes(task)
        return cls(process.pid, ours, process.wait, report, word)

    async def stacks(self) -> str:
        """Ask a guarded process for the Python stacks of its threads."""
        assert self._report is not None, "a process without a guardian writes no stacks"
        before = os.fstat(self._report.fileno()).st_size
        with suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)
        end = time.monotonic() + STACK_WAIT_S
        while STACKS_END.search(stacks := self._read_report(before)) is None and time.monotonic() < end:
            await asyncio.sleep(STACK_POLL_S)
        return stacks

    def crash_report(self) -> str:
        """Return what Python wrote when a guarded process crashed; also after `kill`."""
        return self._written or self._read_report(0)

    def kill(self) -> int:
        """Kill the process unless it has ended; return its exit code. Safe to call twice."""
        with self._killing:
            if self.exit_code is None:
                # The child of the process that this one was forked from is left alone.
                self.exit_code = self._end() if self.parent_pid == os.getpid() else 0
                self.connection.close()
                if self._report is not None:
                    self._written = self._read_report(0)
                    self._report.close()
        return self.exit_code

    def has_ended(self) -> bool:
        with self._killing:
            return self.exit_code is not None or has_ended(self.pid)

    def describe_end(self) -> str:
        """Kill the process unless it has ended, and explain its exit code."""
        return describe_exit(self.kill())

    def _end(self) -> int:
        if self._report is None:
            os.kill(self.pid, signal.SIGKILL)
        else:
            self._end_group()
        return self._reap()

    def _end_group(self) -> None:
        is_guarded = not self.has_ended()
        for number in (signal.SIGTERM, signal.SIGCONT):  # the guardian ends all that was started, then itself
            os.kill(self.pid, number)
        end = time.monotonic() + KILL_WAIT_S
        while not self.has_ended() and time.monotonic() < end:
            time.sleep(0.002)
        # While the guardian lives, whatever loses its parent stays below it.
        _kill_until_gone(partial(_below, self.pid))
        os.killpg(self.pid, signal.SIGKILL)
        if not is_guarded:  # the guardian may have been killed itself, and its orphans are anywhere
            _kill_until_gone(partial(_family, self._word))

    def _read_report(self, start: int) -> str:
        if self._report is None or self._report.closed:
            return ""
        return os.pread(self._report.fileno(), 1 << 16, start).decode(errors="replace")


def _kill_until_gone(find: Callable[[], set[int]]) -> None:
    killed: set[int] = set()
    num_clean = 0
    while num_clean < CLEAN_LOOKS:
        new = find() - killed
        for each in new:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        killed |= new
        num_clean = 0 if new else num_clean + 1


def _family(word: str) -> set[int]:
    """Return the living processes with a word in `FAMILY` of their environment."""
    found: set[int] = set()
    for pid, _ in _living_processes():
        with suppress(OSError):  # it has ended, or is not ours
            if word.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
    return found


def _below(pid: int) -> set[int]:
    children = defaultdict(list)
    for child, parent in _living_processes():
        children[parent].append(child)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = children[waiting.pop()]
        found.update(new)
        waiting += new
    return found


def _living_processes() -> Iterator[tuple[int, int]]:
    """Yield the number of each process that has not ended, and that of its parent."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                yield int(stat.parent.name), int(parent)


def frames_of(stacks: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of the frames in stacks, from the innermost one."""
    return re.findall(r'File "(.*)", line (\d+) in (.*)', stacks)


# Everything below runs in the child.


def run_forked(serve: Serve, connection: Connection, parent_pid: int) -> NoReturn:
    """Serve in a process that was just forked by `parent_pid`, and end it."""
    status = 1
    try:
        end_with_parent(parent_pid)
        serve(connection)
        status = 0
    except Exception:  # noqa: BLE001 (the parent's handlers must not see it)
        traceback.print_exc()
    finally:
        os._exit(status)  # skip what the parent does at its own exit


def _run_fresh(connection_fd: int, report_fd: int, parent_pid: int) -> None:
    connection = become_child(connection_fd, report_fd, parent_pid)
    serve: Serve = pickle.loads(connection.recv_bytes())
    serve(connection)


def become_child(connection_fd: int, report_fd: int, parent_pid: int) -> Connection:
    """Guard this process, just started or forked by `parent_pid`; return its connection."""
    for fd in (connection_fd, report_fd):
        os.set_inheritable(fd, False)  # programs that the function starts need neither
    _guard(parent_pid, connection_fd)
    outlive_readers()
    faulthandler.enable(report_fd, all_threads=True)
    faulthandler.register(STACK_SIGNAL, report_fd, all_threads=True, chain=False)
    return Connection(connection_fd)


def _guard(parent_pid: int, connection_fd: int) -> None:
    """Fork, and return in the child; this process becomes its guardian and ends as the child does.

    Daemons leave the session and the process group of the child, and lose their parent. Linux then hands them
    to the guardian, which kills them when the child ends, on SIGTERM, or when its own parent dies.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, GUARDED)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    end_with_parent(parent_pid, signal.SIGTERM)
    guardian, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent(guardian)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARDED)
        return
    os.close(connection_fd)  # the parent sees its end when the last process that could write to it is gone
    exit_code = _wait_for(child)
    _kill_orphans()
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no other action
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-exit_code})
        os.kill(guardian, -exit_code)
    os._exit(exit_code)


def _wait_for(child: int) -> int:
    """Return the exit code of the child; kill it on SIGTERM, and pass on the request for its stacks."""
    while True:
        number = signal.sigwait(GUARDED)
        if number != signal.SIGCHLD:
            os.kill(child, STACK_SIGNAL if number == STACK_SIGNAL else signal.SIGKILL)
            continue
        pid = -1
        while pid not in (0, child):  # others are orphans
            pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _kill_orphans() -> None:
    """Kill the children of this process until there are none: theirs become its own."""
    with suppress(ChildProcessError):  # no child is left
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for pid, parent in _living_processes():
                    if parent == os.getpid():
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
