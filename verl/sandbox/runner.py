# SPDX-License-Identifier: Apache-2.0
r"""Run an untrusted Python program.

    outcome = run("print(int(input()) + 1)", stdin="41")
    outcome.status, outcome.stdout     # Status.OK, "42\n"

Nothing needs to be installed or running: every run is a process of this interpreter that drops its privileges
(`launcher.py`). A run takes about 50 ms. Thread-safe; blocks until the program ends.
"""

import fcntl
import marshal
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from verl.sandbox import kernel, launcher, program
from verl.sandbox.confinement import NOBODY
from verl.sandbox.outcome import (
    REMEDY,
    Call,
    Isolation,
    Limits,
    Outcome,
    SandboxError,
    SandboxRefusedError,
    Status,
    is_unsafe_allowed,
)

SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
LAST_DYNAMIC_USER = 65519  # end of a range of unused UIDs, which systemd reserves for services
NUM_DYNAMIC_USERS = 4096
BOOT = """
import sys
package = sys.modules["verl"] = type(sys)("verl")
package.__path__ = [sys.argv[1]]
from verl.sandbox.launcher import main
main()
"""  # a bare package, since importing verl itself takes longer than everything else together
PACKAGE = str(Path(__file__).parents[1])
START_LIMIT_S = 20.0  # until the program starts, on the busiest machine
END_LIMIT_S = 0.5  # for the launcher to kill the program and exit; then it is killed as well
STATUS_LIMIT = 1 << 16
KEPT_STDERR = 1 << 16  # bytes of its end, where the traceback is
STATUS_OF_CODE = {
    0: Status.OK,
    program.UNCAUGHT: Status.CRASHED,
    program.OUT_OF_MEMORY: Status.OUT_OF_MEMORY,
    program.REJECTED: Status.REJECTED,
}
ENVIRONMENT = {
    "HOME": "/box", "TMPDIR": "/box", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip


def run(
    source: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    call: Call | None = None,
    preludes: Sequence[str] = (),
    kept_bytes: int | None = None,
    isolation: Isolation | None = None,
    allow_unsafe: bool = False,
) -> Outcome:
    """Run a program and return its outcome.

    With a `call` it runs as a module, otherwise as a script, after the code of `preludes` in the same
    namespace. It can import installed packages. The strongest isolation that works on this machine is used
    unless `isolation` names one; if none works, the program runs only with `allow_unsafe` or
    VERL_SANDBOX_UNSAFE=1. Of stdout and of the value the first `kept_bytes` are returned, by default all.

    Raises:
        SandboxError: The sandbox failed, and the program did not run.
    """
    limits = limits or Limits()
    if isolation is None:
        try:
            isolation = working_isolation(allow_unsafe)
        except SandboxRefusedError as error:
            return Outcome(Status.REFUSED, detail=str(error))
    if limits.processes > 1 and isolation is not Isolation.NAMESPACES:
        why = f"`Limits.processes` ({limits.processes}) must be 1 without namespaces ({isolation} here)"
        return Outcome(Status.REFUSED, detail=why)
    job = job_of(source, limits, call, isolation, preludes)
    kept = limits.output_bytes if kept_bytes is None else kept_bytes
    with started(job, stdin.encode(errors="surrogateescape"), kept) as run:
        begin = time.monotonic()
        while run.selector.get_map() and run.killed_for is None:
            end = begin + START_LIMIT_S if run.started_at is None else run.started_at + limits.wall_s
            run.read(end)
            if time.monotonic() >= end:
                run.killed_for = Status.TIMED_OUT
        run.ended_at = time.monotonic()
    return outcome_of(run, limits)


def working_isolation(allow_unsafe: bool = False) -> Isolation:
    """Return the strongest isolation of this machine.

    Raises:
        SandboxRefusedError: None works, and programs without one are not allowed.
    """
    isolation, cause = detect()
    if isolation is Isolation.NONE and not (allow_unsafe or is_unsafe_allowed()):
        raise SandboxRefusedError(f"no isolation works on this machine: {cause}; {REMEDY}")
    return isolation


@cache
def detect() -> tuple[Isolation, str]:
    """Try each kind of isolation. Return the strongest that works, and why stronger ones do not."""
    causes = []
    if not kernel.is_known_machine():
        return Isolation.NONE, "needs Linux on x86_64 or aarch64"
    for isolation in (Isolation.NAMESPACES, Isolation.LANDLOCK):
        try:
            outcome = run("print(6 * 7)", isolation=isolation)
        except SandboxError as error:
            causes.append(f"{isolation}: {error}")
            continue
        if outcome.status is Status.OK and outcome.stdout == "42\n":
            return isolation, "; ".join(causes)
        causes.append(f"{isolation}: {outcome.status} {outcome.stderr[-300:]}")
    return Isolation.NONE, "; ".join(causes)


def job_of(
    source: str, limits: Limits, call: Call | None, isolation: Isolation, preludes: Sequence[str] = ()
) -> dict:
    is_root = os.geteuid() == 0
    namespaces = isolation is Isolation.NAMESPACES
    user, threads = os.geteuid(), limits.threads
    if is_root:
        user = NOBODY if namespaces else unused_user()
    elif namespaces:
        threads += 2  # launcher and init
    else:
        threads += 1 + threads_of_user(user)  # the launcher
    return {
        "source": source,
        "preludes": list(preludes),
        "call": asdict(call) if call else None,
        "limits": asdict(limits),
        "namespaces": namespaces,
        "confined": isolation is not Isolation.NONE,
        "user": user,
        "max_threads": threads if isolation is not Isolation.NONE else None,
        "scratch": tempfile.gettempdir(),
        "readable": readable_paths(),
        "import_path": import_path(),
    }


@dataclass(eq=False)
class Stream:
    """A file descriptor of a program, and the part of its content that is kept."""

    file: int
    limit: int  # of bytes; a program that writes more is killed
    kept: int  # the first bytes that are kept, or the last
    keeps_end: bool = False
    num_bytes: int = 0
    content: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        part = os.read(self.file, 1 << 16)
        self.num_bytes += len(part)
        self.content += part
        del self.content[slice(-self.kept) if self.keeps_end else slice(self.kept, None)]
        return bool(part)

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


@dataclass
class Run:
    """A program that was started, and what it has written so far."""

    popen: subprocess.Popen
    job: dict
    lifeline: int
    streams: dict[str, Stream]
    selector: selectors.BaseSelector  # of the streams that have not ended
    started_at: float | None = None
    ended_at: float = 0.0
    killed_for: Status | None = None

    def reported(self, word: str) -> str | None:
        lines = (line.partition(" ") for line in self.streams["status"].text.splitlines())
        return next((rest for first, _, rest in lines if first == word), None)

    def read(self, end: float) -> list[Stream]:
        """Read what comes next, before `end`, and return the streams that ended."""
        ended = []
        for key, _ in self.selector.select(max(end - time.monotonic(), 0)):
            if not key.data.read():
                self.selector.unregister(key.fd)
                ended.append(key.data)
            elif key.data.num_bytes > key.data.limit:
                self.killed_for = Status.OUTPUT_LIMIT
            elif key.data is self.streams["status"]:
                self._follow()
        return ended

    def _follow(self) -> None:
        if self.started_at is None and self.reported("started") is not None:
            self.started_at = time.monotonic()
        elif self.job["namespaces"] and self.reported("unshared") is not None and self.started_at is None:
            try:
                _map_users(self.popen.pid, self.job["user"])
                os.write(self.lifeline, b"!")
            except OSError as error:
                raise SandboxError(f"the users of the sandbox cannot be set: {error}") from error


@contextmanager
def started(job: dict, stdin: bytes, kept: int, connection: int | None = None) -> Iterator[Run]:
    """Start a program in an empty folder; kill it at the end.

    The first bytes of stdout and of the value are `kept`. A socket replaces the pipe of the value if
    `connection` is its file descriptor.
    """
    limit = job["limits"]["output_bytes"]
    limits = {
        "stdout": (limit, kept),
        "stderr": (limit, KEPT_STDERR, True),
        "value": (limit, kept),
        "status": (STATUS_LIMIT, STATUS_LIMIT),
    }
    own = nullcontext("/") if job["namespaces"] else tempfile.TemporaryDirectory()  # there it makes its own
    with own as folder, selectors.DefaultSelector() as selector, ExitStack() as files, ExitStack() as passed:
        contents = {"job": marshal.dumps(job), "stdin": stdin}
        theirs = {name: _memory_file(name, content, passed) for name, content in contents.items()}
        streams = {}
        if connection is not None:
            theirs["value"] = connection
            del limits["value"]
        for name, bounds in limits.items():
            ours, theirs[name] = _pipe(files, passed)
            streams[name] = Stream(ours, *bounds)
            selector.register(ours, selectors.EVENT_READ, streams[name])
        theirs["lifeline"], lifeline = _pipe(passed, files)
        popen = _launch(theirs, folder)
        passed.close()
        run = Run(popen, job, lifeline, streams, selector)
        try:
            yield run
        finally:
            _end(run, files)


def _launch(files: dict[str, int], folder: str) -> subprocess.Popen:
    numbers = [str(files[name]) for name in launcher.Files._fields]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", "-c", BOOT, PACKAGE, *numbers],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=files["stderr"],
        pass_fds=list(files.values()),
        env=ENVIRONMENT,
        cwd=folder,
        process_group=0,
    )


def _memory_file(name: str, data: bytes, stack: ExitStack) -> int:
    """Create a sealed file in memory, positioned at its start."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, file)
    with open(file, "wb", closefd=False) as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _pipe(readers: ExitStack, writers: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    readers.callback(os.close, reader)
    writers.callback(os.close, writer)
    return reader, writer


def _map_users(pid: int, user: int) -> None:
    """Map two users into the launcher's user namespace: its own, and the program's."""
    if os.geteuid() == 0:
        users = groups = f"0 0 1\n{user} {user} 1\n"
    else:
        users, groups = (f"{number} {number} 1\n" for number in (os.geteuid(), os.getegid()))
        Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/gid_map").write_text(groups)
    Path(f"/proc/{pid}/uid_map").write_text(users)


def _end(run: Run, files: ExitStack) -> None:
    files.close()  # the lifeline among them
    if not run.job["confined"]:
        _kill_group(run)  # the program may have started others
    try:
        run.popen.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        _kill_group(run)
        run.popen.wait()


def _kill_group(run: Run) -> None:
    with suppress(ProcessLookupError):
        os.killpg(run.popen.pid, signal.SIGKILL)


def outcome_of(run: Run, limits: Limits) -> Outcome:
    if run.started_at is None:
        stderr = run.streams["stderr"].text.strip()[-2000:]
        why = run.reported("failed") or stderr or "it did not start in time"
        raise SandboxError(f"the sandbox could not be set up: {why}")
    ended = run.reported("ended")
    # An unconfined program can cause this.
    if ended is None and run.killed_for is None and run.job["confined"]:
        raise SandboxError("the sandbox failed: its launcher died before it reported how the program ended")
    status, cpu_s, peak_kb = (ended or f"{signal.SIGKILL:d} 0 0").split()
    code = os.waitstatus_to_exitcode(int(status))
    return Outcome(
        status=run.killed_for or _status(code, float(cpu_s), limits),
        stdout=run.streams["stdout"].text,
        stderr=run.streams["stderr"].text,
        is_stdout_cut=run.streams["stdout"].num_bytes > run.streams["stdout"].kept,
        value=(run.streams["value"].text or None) if "value" in run.streams else None,
        exit_code=code if code >= 0 and not run.killed_for else None,
        signal=-code if code < 0 and not run.killed_for else None,
        wall_s=run.ended_at - run.started_at,
        cpu_s=float(cpu_s),
        peak_mb=int(peak_kb) / 1024,
    )


def _status(code: int, cpu_s: float, limits: Limits) -> Status:
    # Processes that the program started have limits of their own, but count here.
    is_over = cpu_s > limits.cpu_s and (limits.processes == 1 or code == -signal.SIGKILL)
    # The kernel counts the limit in ticks, so that it can send SIGXCPU at a usage below it.
    if is_over or (code == -signal.SIGXCPU and cpu_s > limits.cpu_s / 2):
        return Status.TIMED_OUT
    if code == -signal.SIGKILL:  # not by us, so by the kernel: out of memory
        return Status.OUT_OF_MEMORY
    return Status.CRASHED if code < 0 else STATUS_OF_CODE.get(code, Status.WRONG_EXIT)


@cache
def import_path() -> list[str]:
    """Folders of the installed packages. The child knows those of the standard library."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


@cache
def readable_paths() -> list[str]:
    """Paths that a program may read, none inside another."""
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    libraries = [f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib"]
    wanted = [path for path in (*SYSTEM, *standard, *libraries, *import_path()) if os.path.exists(path)]
    # Real paths too, so that symbolic links need not be followed.
    paths = sorted({os.path.abspath(path) for path in wanted} | {os.path.realpath(path) for path in wanted})
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def unused_user() -> int:
    """Return a user for the run that this thread waits for: runs at the same time share no limit."""
    return LAST_DYNAMIC_USER - threading.get_native_id() % NUM_DYNAMIC_USERS


def threads_of_user(user: int) -> int:
    """Number of threads of a user on this machine, as far as this process can see."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == user:
                    total += len(os.listdir(f"{entry.path}/task"))
            except OSError:  # it has ended
                continue
    return total
