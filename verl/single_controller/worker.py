# SPDX-License-Identifier: Apache-2.0
"""The base of what runs in each worker process: one process for each device.

While a process runs a call its name is the call's phase: `top` and `ps -o pid,comm` show `update_actor`.

Subclass it, mark with `@register` what the controller may call, and hand the class to a worker group. To
split batches (`Dispatch.SHARD`), call `set_axis` before the first such call.
"""

import faulthandler
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from verl.single_controller.dispatch import Place

STACKS_WAIT_S = 0.5  # a worker has this long to write where it stands
NAME = Path("/proc/self/comm")  # of this process; the kernel keeps 15 characters, Ray puts its own back


class WorkerInfo(NamedTuple):
    """Who and where a worker is, for errors."""

    rank: int
    pid: int
    host: str
    stacks_fd: int  # its descriptor of the file that SIGUSR1 makes it write all its threads' stacks to


class Worker:
    """One process of a worker group.

    Attributes:
        rank: Among all processes of the group.
        world_size: The number of processes.
        local_rank: The index of this process's device among those it sees; on CPU its index on the node.
        phase: What the running call does, "" between calls.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.phase = ""
        self._places: dict[str, Place] = {}
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process, and nameless
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def __repr__(self) -> str:
        """Return the prefix of this worker's lines on the console."""
        return f"rank {os.environ['RANK']}"

    def set_axis(self, name: str, index: int, size: int, is_first: bool) -> None:
        """Say which part of a batch this rank gets.

        Args:
            name: "train" or "rollout".
            index: Its place on the data-parallel axis.
            size: The number of places.
            is_first: Whether it is the first of the ranks with this index: its result counts for all of them.
        """
        self._places[name] = Place(index, size, is_first)

    def axes(self) -> dict[str, Place]:
        """Return where this rank stands on each axis."""
        return dict(self._places)

    def info(self) -> WorkerInfo:
        """Return who and where this worker is."""
        return WorkerInfo(self.rank, os.getpid(), socket.gethostname(), self._stacks.fileno())

    def execute(self, name: str, phase: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method and return its result."""
        self._show(phase)
        result = getattr(self, name)(*args, **kwargs)
        self._show("")
        return result

    def stream(self, name: str, phase: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run a generator method and yield its items."""
        self._show(phase)
        items = getattr(self, name)(*args, **kwargs)
        for item in items:  # noqa: UP028 - Ray sends values into generators, which not every iterator takes
            yield item
        self._show("")

    def drain(self, name: str, phase: str, *args: Any, **kwargs: Any) -> None:
        """Run a generator method to its end: its items are another rank's too."""
        for _ in self.stream(name, phase, *args, **kwargs):
            pass

    def _show(self, phase: str) -> None:
        """Say what this process does from now on; "" is nothing."""
        self.phase = phase
        NAME.write_text(phase or "idle")


def read_stacks(info: WorkerInfo) -> str:
    """Return the stacks of all threads of a worker on this machine, also of one stuck in native code."""
    os.kill(info.pid, signal.SIGUSR1)
    time.sleep(STACKS_WAIT_S)
    return Path(f"/proc/{info.pid}/fd/{info.stacks_fd}").read_text()


def is_stopped_process(info: WorkerInfo) -> bool:
    """Whether somebody stopped a worker on this machine by SIGSTOP: it lives and does nothing."""
    state = Path(f"/proc/{info.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


def end_process(info: WorkerInfo) -> None:
    """Kill a worker on this machine; a stopped one too."""
    os.kill(info.pid, signal.SIGKILL)
