# SPDX-License-Identifier: Apache-2.0
r"""A Python session in the sandbox: cells of code that share their variables.

with Session() as session:
    session.run("x = 6").text            # ""
    session.run("x * 7").text            # "42\n"

Figures of matplotlib, and a Pillow image in the last line, come as PNG. Code that runs too long is
interrupted and its variables stay; what cannot be interrupted, or uses too much memory, ends the session.
"""

import base64
import json
import selectors
import socket
import struct
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from verl.sandbox.outcome import Isolation, Limits, SandboxError, Status
from verl.sandbox.runner import START_LIMIT_S, Run, Stream, job_of, outcome_of, started, working_isolation

SESSION_LIMITS = Limits(cpu_s=600, memory_mb=2048)  # of all cells together; `wall_s` is that of one
GRACE_S = 2.0  # for a cell that was interrupted to end
EXIT_WAIT_S = 2.0
KEPT_BYTES = 1 << 16  # of what is written past `sys.stdout`, which only an error shows
MAX_ANSWER = 32 << 20  # bytes
MAX_CHARACTERS = 1 << 14  # of the text; the middle of a longer one is cut out
SIZE = struct.Struct("!I")
MAX_MESSAGE = SIZE.size + MAX_ANSWER
ENDINGS = {
    Status.TIMED_OUT: "it took too long and could not be interrupted",
    Status.OUT_OF_MEMORY: "it needed too much memory",
    Status.OUTPUT_LIMIT: "it wrote too much",
}


class Cell(NamedTuple):
    """The result of a cell."""

    text: str  # what it printed, the value of its last line, and its traceback
    images: list[bytes]  # PNG, written by the program and not to be trusted


class SessionEndedError(RuntimeError):
    """The program of a session ended, and its variables are lost; the message says why."""


class Session(AbstractContextManager["Session"]):
    """Runs cells until it is closed or ends; not thread-safe.

    Raises:
        SandboxError: The sandbox failed, or no isolation works on this machine (`SandboxRefusedError`).
    """

    def __init__(
        self, limits: Limits = SESSION_LIMITS, isolation: Isolation | None = None, allow_unsafe: bool = False
    ) -> None:
        self.limits = limits
        isolation = isolation or working_isolation(allow_unsafe)
        self._files = ExitStack()
        self._is_closed = False
        source = (Path(__file__).parent / "cells.py").read_text(encoding="utf-8")
        job = job_of(source, limits, None, isolation)
        self._socket, theirs = socket.socketpair()
        self._files.callback(self._socket.close)
        self._answer = Stream(self._socket.fileno(), MAX_MESSAGE, MAX_MESSAGE)
        with self._files as undo, theirs:
            self._run: Run = undo.enter_context(started(job, b"", KEPT_BYTES, theirs.fileno()))
            end = time.monotonic() + START_LIMIT_S
            while self._run.started_at is None:
                if not self._run.selector.get_map() or time.monotonic() > end:
                    outcome_of(self._run, limits)  # raises the reason
                self._read(end)
            self._run.selector.register(self._socket, selectors.EVENT_READ, self._answer)
            self._files = undo.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, code: str, max_images: int = 4) -> Cell:
        """Run code and wait for its result.

        Raises:
            SessionEndedError: The program has ended.
        """
        if self._is_closed:
            raise SessionEndedError("it has ended already")
        limit_s = self.limits.wall_s
        request = {
            "code": code, "limit_s": limit_s, "max_characters": MAX_CHARACTERS, "max_images": max_images,
        }  # fmt: skip
        message = json.dumps(request).encode()
        end = time.monotonic() + limit_s + GRACE_S
        self._answer.content.clear()
        self._answer.num_bytes = 0
        try:
            self._socket.settimeout(limit_s + GRACE_S)
            self._socket.sendall(SIZE.pack(len(message)) + message)
            while (answer := self._whole_answer()) is None:
                if time.monotonic() > end:
                    self._run.killed_for = Status.TIMED_OUT
                    raise EOFError
                self._read(end)
        except (EOFError, OSError):
            raise SessionEndedError(self._ending()) from None
        return answer

    def close(self) -> None:
        """End the program. Safe to call twice."""
        self._is_closed = True
        self._files.close()

    def _read(self, end: float) -> None:
        """Read some of what the sandbox writes; raise an EOFError when its program has ended."""
        if self._answer in self._run.read(end) or self._run.killed_for is not None:
            raise EOFError

    def _whole_answer(self) -> Cell | None:
        content = self._answer.content
        if len(content) < SIZE.size:
            return None
        (size,) = SIZE.unpack(content[: SIZE.size])
        if size > MAX_ANSWER:
            self._run.killed_for = Status.OUTPUT_LIMIT
            raise EOFError
        if len(content) < SIZE.size + size:
            return None
        try:
            answer = json.loads(content[SIZE.size :])
            return Cell(str(answer["text"]), [base64.b64decode(image) for image in answer["images"]])
        # the code wrote to the connection
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise EOFError from error

    def _ending(self) -> str:
        """Return why the program ended, and close the session."""
        end = time.monotonic() + EXIT_WAIT_S
        with suppress(KeyError):
            self._run.selector.unregister(self._socket)
        while self._run.killed_for is None and self._run.selector.get_map() and time.monotonic() < end:
            self._run.read(end)
        self._run.ended_at = time.monotonic()
        try:
            outcome = outcome_of(self._run, self.limits)
        except SandboxError:
            return "its program stopped answering"
        finally:
            self.close()
        if outcome.signal is not None:
            return ENDINGS.get(outcome.status, f"signal {outcome.signal} ended it")
        return ENDINGS.get(outcome.status, "it ended its own process")
