# SPDX-License-Identifier: Apache-2.0
"""Base class of the worker processes, one per device.

Subclass it, mark the methods that the controller may call with `@register`, and pass the class to a worker
group. Call `set_axis` before the first call that splits batches (`Dispatch.SHARD`).
"""

import faulthandler
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from verl.single_controller.dispatch import AxisRank

STACKS_WAIT_S, STACKS_POLL_S = 5.0, 0.02  # for a worker to write its stacks
STACKS_END = re.compile(r"( in <module>|\.\.\.)\n\Z")  # of the main thread, the last; dots end a deep stack
# Process name: `top` shows the running phase. The kernel keeps 15 characters; Ray restores its own name.
NAME = Path("/proc/self/comm")


class WorkerInfo(NamedTuple):
    """Identity of a worker process, for errors and for signals to it."""

    rank: int
    pid: int
    host: str
    stacks_fd: int  # file to which SIGUSR1 makes it write the stacks of its threads


class Worker:
    """One process of a worker group; `phase` is the running call, "" between calls."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        # Index of the device among the visible ones; on CPU the index on the node.
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.phase = ""
        self._axes: dict[str, AxisRank] = {}
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def set_axis(self, name: str, index: int, size: int, is_first: bool) -> None:
        """Set this rank's data-parallel index on the axis "train" or "rollout".

        With `is_first`, the rank is the first with this index and its result counts for all of them.
        """
        self._axes[name] = AxisRank(index, size, is_first)

    def axes(self) -> dict[str, AxisRank]:
        return dict(self._axes)

    def info(self) -> WorkerInfo:
        return WorkerInfo(self.rank, os.getpid(), socket.gethostname(), self._stacks.fileno())

    def execute(self, name: str, phase: str, *args: Any, **kwargs: Any) -> Any:
        self._show(phase)
        result = getattr(self, name)(*args, **kwargs)
        self._show("")
        return result

    def stream(self, name: str, phase: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self._show(phase)
        for item in getattr(self, name)(*args, **kwargs):  # noqa: UP028 - Ray sends values into generators
            yield item
        self._show("")

    def drain(self, name: str, phase: str, *args: Any, **kwargs: Any) -> None:
        """Run a generator method to its end; another rank returns the same items."""
        for _ in self.stream(name, phase, *args, **kwargs):
            pass

    def close(self) -> None:
        """End what belongs to this process, when its group is shut down; not after a failure."""

    def _show(self, phase: str) -> None:
        self.phase = phase
        NAME.write_text(phase or "idle")


def read_stacks(info: WorkerInfo) -> str:
    """Return the stacks of all threads of a worker on this machine, even of one stuck in native code."""
    file = Path(f"/proc/{info.pid}/fd/{info.stacks_fd}")
    before = len(file.read_text())
    os.kill(info.pid, signal.SIGUSR1)
    end = time.monotonic() + STACKS_WAIT_S
    while STACKS_END.search(stacks := file.read_text()[before:]) is None and time.monotonic() < end:
        time.sleep(STACKS_POLL_S)
    return stacks


def is_stopped_process(info: WorkerInfo) -> bool:
    state = Path(f"/proc/{info.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"  # by SIGSTOP: alive, but not running


def end_process(info: WorkerInfo) -> None:
    os.kill(info.pid, signal.SIGKILL)  # ends stopped processes too
