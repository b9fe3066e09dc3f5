# SPDX-License-Identifier: Apache-2.0
"""The process around a program: sets up the sandbox, starts the program in it, reports how it ended.

    launcher     same user as the caller; leaves its namespaces, builds the root folder
      init       process 1 of the new process namespace: when it ends, the kernel kills all processes there
        program  drops the remaining privileges and executes the source

Without namespaces there is no init. Lines on the status pipe: `unshared`, `failed WHY`, `started`,
`ended WAIT_STATUS CPU_SECONDS PEAK_KB`. When the other end of the lifeline closes, the program is killed.
"""

import fcntl
import importlib
import marshal
import os
import resource
import select
import signal
import sys
from collections import namedtuple

from verl.sandbox import confinement, kernel, program

FIRST_FREE = 10  # file descriptors from here on are free for moving files
VALUE, STATUS = 3, 4  # file descriptors of the program, after the standard three

Files = namedtuple("Files", "job stdin stdout stderr value status lifeline")  # inherited file descriptors


def main() -> None:
    """Run the job whose file descriptors are on the command line. Returns in the program's process only."""
    files = Files(*map(int, sys.argv[2:]))
    job = _prepare(files)
    child = os.fork()
    if child:
        _supervise(child, files, report=not job["namespaces"])
    if job["namespaces"]:
        child = os.fork()
        if child:
            _supervise(child, files, report=True)
    _be_the_program(job, files)
    program.execute(job, VALUE)


def _report(status: int, line: str) -> None:
    os.write(status, (line.replace("\n", " ")[:2000] + "\n").encode())


def _fail(status: int, error: Exception) -> None:
    _report(status, f"failed {error}")
    os._exit(1)


def _prepare(files: Files) -> dict:
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # Python's own would reach the init from inside
        with os.fdopen(files.job, "rb") as file:
            job = marshal.load(file)
        os.close(_open_process(os.getpid()))  # `_supervise` cannot do without it
        if job["call"] is not None:
            # It cannot be found later. The import is slow, so only where it is needed.
            importlib.import_module("verl.sandbox.values")
        if job["namespaces"]:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # so that the caller may write the user mapping
            kernel.unshare(kernel.NEW_NAMESPACES)
            _report(files.status, "unshared")
            if os.read(files.lifeline, 1) != b"!":
                os._exit(1)
            size_mb = job["limits"]["folder_mb"]
            confinement.build_root(job["scratch"], job["readable"], files.stdin, size_mb, job["user"])
    except (OSError, ValueError, EOFError) as error:
        _fail(files.status, error)
    return job


def _open_process(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:  # some filters of containers do not know it
        raise OSError(error.errno, f"pidfd_open: {error.strerror}") from error


def _supervise(child: int, files: Files, *, report: bool) -> None:
    """Wait for a child. Kill it when the caller closes the lifeline."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    for file in (files.stdin, files.stdout, files.stderr, files.value):
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    poll = select.poll()
    poll.register(_open_process(child), select.POLLIN)
    poll.register(files.lifeline, 0)  # a hang-up is always reported
    if files.lifeline in dict(poll.poll()):
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    if report:
        cpu = usage.ru_utime + usage.ru_stime
        _report(files.status, f"ended {status} {cpu:.6f} {usage.ru_maxrss}")
    os._exit(0)


def _be_the_program(job: dict, files: Files) -> None:
    """Keep the program's files only, drop every privilege, and report the start."""
    try:
        if job["namespaces"]:
            os.dup2(os.open("/dev/stdin", os.O_RDONLY), files.stdin)
        wanted = (files.stdin, files.stdout, files.stderr, files.value, files.status)
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE) for file in wanted]
        for number, file in enumerate(moved):
            os.dup2(file, number)
        os.closerange(STATUS + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if job["confined"]:
            readable = None if job["namespaces"] else job["readable"]
            confinement.confine(job["limits"], job["user"], readable, job["max_threads"])
        else:
            confinement.limit_resources(job["limits"], job["max_threads"])
    except (OSError, ValueError) as error:
        _fail(STATUS if "moved" in locals() else files.status, error)
    _report(STATUS, "started")
    os.close(STATUS)
