# SPDX-License-Identifier: Apache-2.0
"""What a program in the sandbox may use, and what became of it."""

from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20


class Status(StrEnum):
    """How a program ended."""

    OK = "ok"  # it ended by itself with exit code 0
    WRONG_EXIT = "wrong_exit"  # it ended by itself with another exit code
    CRASHED = "crashed"  # an exception that nobody caught, or a signal
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"  # it wrote more than it may
    REJECTED = "rejected"  # an assertion of its test did not hold
    REFUSED = "refused"  # it was not run, because nothing would have contained it


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    CPU time decides, so that a busy machine fails nobody; the wall clock ends what sleeps.
    """

    cpu_s: int = 6  # of all threads of one process together
    wall_s: float = 15.0
    memory_mb: int = 1024  # address space of each process: code, data, stacks, mapped files
    processes: int = 1  # the program itself; more are possible with namespaces only
    threads: int = 64  # of all its processes together
    output_bytes: int = 16 * MIB  # of stdout, of stderr and of the value, each
    folder_mb: int = 64  # of everything in the working folder; also the largest file
    open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"`Limits.{name}` must be positive, got {value}")


@dataclass(frozen=True)
class Call:
    """What to do after the program has been executed as a module, in its namespace.

    `epilogue` is executed; then the value of `target`, called with `arguments` if there are any, is
    written to `Outcome.value`. The name of a method of the program's class `Solution` means that method.
    """

    target: str = ""
    arguments: str | None = None  # a JSON list
    epilogue: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a program did."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    value: str | None = None  # of a `Call`, as tagged JSON (see `values.py`): written by the program, so
    # to be read as material; None when it did not get so far
    exit_code: int | None = None  # when it ended by itself
    signal: int | None = None  # when a signal ended it
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_mb: float = 0.0  # resident memory
    detail: str = ""  # why it was refused


class SandboxError(RuntimeError):
    """The sandbox itself failed: says nothing about the program, which did not run."""


class SandboxRefusedError(SandboxError):
    """Nothing on this machine would contain the program, so it was not run."""
