# SPDX-License-Identifier: Apache-2.0
"""One reward process as the controller sees it: started, spoken to, asked where it hangs, killed."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from verl.rewards.function import Scores
from verl.rewards.worker_process import CALL_NUMBER, STACK_SIGNAL, Failure, Ready

NEVER = float("inf")
LATE_GRACE_S = 2.0  # an `async def` call times out inside its process first, where the reason is known
STACK_WAIT_S = 1.0  # how long a late process may take to write where it is
SEND_TIMEOUT_S = 5  # a process that reads nothing for so long is dead
BOOT = "import sys; from verl.rewards.worker_process import main; main(*map(int, sys.argv[1:]))"


@dataclass(eq=False)
class Call:
    """One call of the reward function, and whom to tell."""

    rows: list[int]
    inputs: list[dict[str, Any]]
    payload: bytes  # pickle of (rows, inputs)
    on_scores: Callable[["Call", list[Scores]], None]
    on_failure: Callable[["Call", Failure], None]
    is_wanted: Callable[[], bool]  # False once its job has given up
    deadline: float = 0.0
    failures: list[Failure] = field(default_factory=list)  # of its attempts so far
    is_alone: bool = (
        False  # it shares no process: one that it shared ended, and which call did that is unknown
    )


class ChildProcess:
    """One reward process as the pool sees it."""

    def __init__(self, setup: bytes, load_deadline: float) -> None:
        ours, theirs = socket.socketpair()
        self._report = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        arguments = [theirs.fileno(), self._report.fileno(), os.getpid()]
        self.popen = subprocess.Popen(
            [sys.executable, "-c", BOOT, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=arguments[:2],
            start_new_session=True,  # Ctrl-C is the controller's; what the function starts is killed with it
            env=_environment(),
        )
        theirs.close()
        # A send to a process that reads nothing must not stop the pool's thread.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self.connection = Connection(ours.detach())
        self.pidfd = os.pidfd_open(self.popen.pid)
        self.connection.send_bytes(setup)
        self.load_deadline = load_deadline
        self.capacity = 0  # calls it may hold at once; none before it is loaded
        self.grace_s = 0.0
        self.calls: dict[int, Call] = {}
        self.num_answers = 0

    @property
    def is_loaded(self) -> bool:
        """Whether it has imported the user's file."""
        return self.capacity > 0

    def loaded(self, ready: Ready, max_concurrency: int) -> None:
        """Note that calls can be sent, `max_concurrency` at a time if the function is `async def`."""
        self.capacity = max_concurrency if ready.is_async else 1
        self.grace_s = LATE_GRACE_S if ready.is_async else 0.0

    def has_room_for(self, call: Call) -> bool:
        """Whether a call can be sent now."""
        held = next(iter(self.calls.values()), None)  # a call that is alone is the only one
        if call.is_alone or (held is not None and held.is_alone):
            return self.is_loaded and held is None
        return len(self.calls) < self.capacity

    def send(self, number: int, call: Call) -> None:
        """Send a call; an OSError says that the process is gone or reads nothing."""
        self.calls[number] = call
        self.connection.send_bytes(CALL_NUMBER.pack(number) + call.payload)

    def next_deadline(self) -> float:
        """When it is late, on the monotonic clock."""
        if not self.is_loaded:
            return self.load_deadline
        return min((call.deadline for call in self.calls.values()), default=NEVER)

    def has_message(self) -> bool:
        """Whether something can be read from it."""
        try:
            return self.connection.poll()
        except OSError:
            return False

    def stacks(self) -> str:
        """Ask the process where it is."""
        before = os.fstat(self._report.fileno()).st_size
        os.kill(self.popen.pid, STACK_SIGNAL)
        end = time.monotonic() + STACK_WAIT_S
        size = before
        while time.monotonic() < end:
            time.sleep(0.02)
            previous, size = size, os.fstat(self._report.fileno()).st_size
            if size > before and size == previous:
                break
        return os.pread(self._report.fileno(), 1 << 16, before).decode(errors="replace")

    def report(self) -> str:
        """What Python wrote when it crashed, if it did."""
        text = os.pread(self._report.fileno(), 1 << 16, 0).decode(errors="replace")
        return f"\n{text}" if text else ""

    def how_it_ended(self) -> str:
        """Why the process is gone; one that only closed its connection is ended here."""
        try:
            code = self.popen.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        if code >= 0:
            return f"exited with status {code} (did the function call `exit`?)"
        hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def stop(self) -> None:
        """Kill the process and what it started."""
        with contextlib.suppress(ProcessLookupError):  # it and its group are gone already
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        os.close(self.pidfd)
        self.connection.close()
        self._report.close()


def _environment() -> dict[str, str]:
    """The controller's environment with its import path; one thread, since the pool is the parallelism."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ | {"PYTHONPATH": path}
