# SPDX-License-Identifier: Apache-2.0
"""What went wrong on which rank, told so that the user sees the cause first."""

import re
from typing import NamedTuple

from ray.exceptions import ActorDiedError, RayError, RayTaskError

from verl.single_controller.dispatch import RemoteMethod
from verl.single_controller.worker import WorkerInfo

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class WorkerError(RuntimeError):
    """A rank failed and the group was killed.

    Attributes:
        rank: The rank that caused it.
        phase: What it was doing.
        died: Whether its process ended, rather than raised.
        hung: Whether it was stopped, or made no progress.
    """

    def __init__(self, message: str, *, rank: int, phase: str, died: bool, hung: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.died = died
        self.hung = hung

    @property
    def may_go_away(self) -> bool:
        """Whether new processes may do what these did not: nothing of ours raised."""
        return self.died or self.hung


class Failure(NamedTuple):
    """One rank's failure, as Ray reports it."""

    rank: int
    method: RemoteMethod
    error: RayError


def is_death(failure: Failure) -> bool:
    """Say whether the process ended: everything but an exception of the method or of the constructor."""
    return not isinstance(failure.error, RayTaskError) and not _failed_in_constructor(failure.error)


def worker_error(failures: list[Failure], infos: list[WorkerInfo], world_size: int) -> WorkerError:
    """Return the error for the controller; the first failure is the cause, the others are listed."""
    cause = failures[0]
    died = is_death(cause)
    where = f"rank {cause.rank} of {world_size}"
    if infos:
        where += f" (pid {infos[cause.rank].pid} on {infos[cause.rank].host})"
    verb = "died" if died else "failed"
    message = (
        f"{where} {verb} in phase `{cause.method.phase}` (method `{cause.method.name}`): {summary(cause)}"
    )
    others = [other for other in failures[1:] if summary(other) != summary(cause)]
    message += "".join(f"\nalso failed: rank {other.rank}: {summary(other)}" for other in others)
    if not died:
        message += f"\n\ntraceback of rank {cause.rank}:\n{_text(cause.error)}"
    return WorkerError(message, rank=cause.rank, phase=cause.method.phase, died=died)


def summary(failure: Failure) -> str:
    """Return one line that says what happened."""
    error = failure.error
    cause = error.cause if isinstance(error, RayTaskError) else None
    if cause is not None and not isinstance(cause, RayError):
        return f"{type(cause).__name__}: {cause}"
    last_line = _text(error).rstrip().splitlines()[-1]
    if not is_death(failure):
        return last_line
    return (
        "the process was killed or crashed; if by the kernel for want of memory, `dmesg` says so"
        f" [Ray: {type(error).__name__}: {last_line}]"
    )


def _failed_in_constructor(error: RayError) -> bool:
    return isinstance(error, ActorDiedError) and "creation task" in str(error)


def _text(error: RayError) -> str:
    lines = ANSI_COLOUR.sub("", str(error)).splitlines()
    return "\n".join(
        line for line in lines if line.strip(" ^~")
    )  # Ray leaves markers of lines that it removes
