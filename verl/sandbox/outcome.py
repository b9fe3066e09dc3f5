# SPDX-License-Identifier: Apache-2.0
"""Isolation and limits of a program in the sandbox, and its outcome."""

import os
from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20
UNSAFE_VARIABLE = "VERL_SANDBOX_UNSAFE"
REMEDY = (
    "give the machine one of them (user namespaces: `sysctl user.max_user_namespaces`,"
    " `kernel.apparmor_restrict_unprivileged_userns=0`, or in a container a seccomp profile that allows"
    " `unshare`; Landlock: Linux 6.2 with `landlock` among its `lsm=`), or, for programs that you trust, set"
    f" {UNSAFE_VARIABLE}=1"
)


class Isolation(StrEnum):
    """Ways to isolate a program, strongest first."""

    NAMESPACES = "namespaces"  # a root folder, processes and network of its own; and seccomp
    LANDLOCK = "landlock"  # Landlock and seccomp: no namespaces, no writable folder, one process
    NONE = "none"  # resource limits only: no protection against malice


class Status(StrEnum):
    """Ending of a program."""

    OK = "ok"  # it ended by itself with exit code 0
    WRONG_EXIT = "wrong_exit"  # it ended by itself with another exit code
    CRASHED = "crashed"  # an uncaught exception or a signal
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"  # it wrote more than it may
    REJECTED = "rejected"  # an assertion of its test did not hold
    REFUSED = "refused"  # it did not run, because no isolation works here


@dataclass(frozen=True)
class Limits:
    """Resource limits of one run."""

    # CPU time decides, so that a machine may be busy; the wall clock ends programs that sleep.
    cpu_s: float = 6  # of all threads of one process together; the kernel ends it at the next whole second
    wall_s: float = 15.0
    memory_mb: int = 1024  # address space of each process: code, data, stacks, mapped files
    processes: int = 1  # more allow any number within `threads`, and need namespaces
    threads: int = 64  # of all its processes together, their first ones included
    output_bytes: int = 16 * MIB  # of stdout, of stderr and of the value, each
    folder_mb: int = 64  # of everything in the working folder; also the largest file
    open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"`Limits.{name}` must be positive, got {value}")


@dataclass(frozen=True)
class Call:
    """An expression to evaluate after the program has run as a module, in the module's namespace.

    `epilogue` is executed; then the value of `target`, called with `arguments` if there are any (its value
    then counts as JSON), is written to `Outcome.value`. If the program's class `Solution` has a method named
    `target`, it is called.
    """

    target: str = ""
    arguments: str | None = None  # a JSON list
    epilogue: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    status: Status
    stdout: str = ""
    stderr: str = ""  # its end, up to 64 KiB
    is_stdout_cut: bool = False  # the program wrote more than was kept
    # Value of a `Call` as text (see `values.py`), written by the program and not to be trusted;
    # None if it ended before.
    value: str | None = None
    exit_code: int | None = None  # when it ended by itself
    signal: int | None = None  # when a signal ended it
    wall_s: float = 0.0
    # The following are 0 for a program that was killed by the wall clock or for its output.
    cpu_s: float = 0.0
    peak_mb: float = 0.0  # resident memory
    detail: str = ""  # why it was refused


class SandboxError(RuntimeError):
    """The sandbox itself failed, and the program did not run."""


class SandboxRefusedError(SandboxError):
    """No isolation works on this machine, so the program did not run."""


def is_unsafe_allowed() -> bool:
    return os.environ.get(UNSAFE_VARIABLE) == "1"
