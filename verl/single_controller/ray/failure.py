# SPDX-License-Identifier: Apache-2.0
"""Errors of worker processes, reported with the cause first."""

import re
from typing import TYPE_CHECKING, NamedTuple

from ray.exceptions import ActorDiedError, RayError, RayTaskError

from verl.distributed.weights.peer_lost import PeerLostError

if TYPE_CHECKING:  # errors are known before torch is imported
    from verl.single_controller.dispatch import RemoteMethod
    from verl.single_controller.worker import WorkerInfo

ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class WorkerError(RuntimeError):
    """A rank failed and the group was killed."""

    def __init__(
        self, message: str, *, rank: int, phase: str, died: bool, hung: bool = False, lost_peer: bool = False
    ) -> None:
        super().__init__(message)
        self.rank, self.phase = rank, phase  # of the cause
        self.died = died  # its process ended, without an exception
        self.hung = hung  # it was stopped, or made no progress
        # a restart may succeed: it, or a process of another group that it depends on, was lost
        self.may_go_away = died or hung or lost_peer


class Failure(NamedTuple):
    """One rank's failure, as reported by Ray."""

    rank: int
    method: "RemoteMethod"
    error: RayError


def is_death(failure: Failure) -> bool:
    """Return whether the process ended, without an exception of the method or the constructor."""
    error = failure.error
    in_constructor = isinstance(error, ActorDiedError) and "creation task" in str(error)
    return not isinstance(error, RayTaskError) and not in_constructor


def worker_error(failures: list[Failure], infos: "list[WorkerInfo]", world_size: int) -> WorkerError:
    """Build the error for the controller; the first failure is the cause, the others are listed."""
    cause = failures[0]
    died = is_death(cause)
    where = f"rank {cause.rank} of {world_size}"
    if infos:
        where += f" (pid {infos[cause.rank].pid} on {infos[cause.rank].host})"
    verb = "died" if died else "failed"
    method = cause.method
    message = f"{where} {verb} in phase `{method.phase}` (method `{method.name}`): {summary(cause)}"
    others = [other for other in failures[1:] if summary(other) != summary(cause)]
    message += "".join(f"\nalso failed: rank {other.rank}: {summary(other)}" for other in others)
    if not died:
        message += f"\n\ntraceback of rank {cause.rank}:\n{_text(cause.error)}"
    lost_peer = isinstance(_raised(cause), PeerLostError)
    return WorkerError(message, rank=cause.rank, phase=method.phase, died=died, lost_peer=lost_peer)


def summary(failure: Failure) -> str:
    error, raised = failure.error, _raised(failure)
    if raised is not None and not isinstance(raised, RayError):
        return f"{type(raised).__name__}: {raised}"
    last_line = _text(error).rstrip().splitlines()[-1]
    if not is_death(failure):
        return last_line
    return (
        "the process was killed or crashed; if the kernel ran out of memory, `dmesg` shows it"
        f" [Ray: {type(error).__name__}: {last_line}]"
    )


def _raised(failure: Failure) -> BaseException | None:
    return failure.error.cause if isinstance(failure.error, RayTaskError) else None


def _text(error: RayError) -> str:
    lines = ANSI_COLOR.sub("", str(error)).splitlines()
    # Ray removes source lines of a traceback but leaves their markers.
    return "\n".join(line for line in lines if line.strip(" ^~"))
