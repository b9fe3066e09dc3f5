# SPDX-License-Identifier: Apache-2.0
"""The pool's end of the host of tools, and of the processes that it forked; all on the pool's event loop."""

import asyncio
import os
import pickle
import resource
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from typing import Any

from verl.agents.tools.host import FORK, KILL, REQUEST, STACKS, Loaded, LoadFailure, ToolFacts, host_of
from verl.agents.tools.tool_server import Answer
from verl.config.multi_turn import MultiTurnConfig
from verl.utils.processes.child_channel import BadMessageError, ChildChannel
from verl.utils.processes.child_process import ChildProcess, describe_exit, frames_of, whole_stacks

LOAD_TIMEOUT_S = 300.0  # to import the files of the tools: they may load an index, or import torch
EXIT_WAIT_S = 3.0  # between the end of its connection and that of a process
MAX_MESSAGE = 64 << 20  # bytes
MAX_FILES = 1 << 16  # open files: each process has two
SHOWN_FRAMES = 5
WITH_HOST = "ended with the process that all tools have in common"


class ProcessEndedError(Exception):
    """A tool's process ended during a call; the message begins with a verb."""


class HostEndedError(Exception):
    """The host of the tools ended, and with it all its processes."""


class ToolHost:
    """The process that imports the tools and forks theirs."""

    def __init__(self, options: MultiTurnConfig) -> None:
        _raise_file_limit()
        self.child = ChildProcess.start(host_of(options))
        self.channel = ChildChannel(self.child.connection.fileno(), MAX_MESSAGE)
        self.has_ended = False
        self._numbers = count()
        self._exits: dict[int, asyncio.Future[str]] = {}

    async def load(self) -> list[ToolFacts]:
        """Wait until the tools are loaded.

        Raises:
            ValueError: One of them cannot be loaded.
        """
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                message = await self.channel.receive()
        except TimeoutError:
            stacks = await self.child.stacks()
            raise ValueError(f"importing the tools took over {LOAD_TIMEOUT_S:g} s\n{stacks}") from None
        except (EOFError, OSError, BadMessageError):
            report = self.child.crash_report()
            how = describe_exit(self.child.kill())
            raise ValueError(f"the process that imports the tools {how}\n{report}") from None
        if isinstance(message, LoadFailure):
            raise ValueError(message.message)
        assert isinstance(message, Loaded)
        return message.tools

    async def watch(self) -> None:
        """Note the processes that end, and raise a `HostEndedError` when the host does."""
        try:
            with suppress(EOFError, OSError, BadMessageError):
                while True:
                    number, exit_code = await self.channel.receive()
                    self._exits.pop(number).set_result(describe_exit(exit_code))
        finally:
            self.has_ended = True
            for ended in self._exits.values():
                ended.set_result(WITH_HOST)
        raise HostEndedError

    async def fork(self, index: int) -> "ToolProcess":
        """Start a process for the tool `index`."""
        number = next(self._numbers)
        ours, theirs = Pipe()
        with theirs:
            process = ToolProcess(self, number, ChildChannel(ours.fileno(), MAX_MESSAGE))
            ours.close()
            if self.has_ended:
                process.exit.set_result(WITH_HOST)
            else:
                self._exits[number] = process.exit
            await self.send(FORK, index, number, [theirs.fileno(), process.report.fileno()])
        return process

    async def send(self, operation: bytes, index: int, number: int, files: Sequence[int] = ()) -> None:
        await self.channel.send_files(REQUEST.pack(operation, index, number), files)

    def close(self) -> None:
        """Kill the host and all its processes."""
        self.channel.close()
        self.child.kill()


class ToolProcess:
    """A process of one tool; it has one call at a time."""

    def __init__(self, host: ToolHost, number: int, channel: ChildChannel) -> None:
        self.host, self.number, self._channel = host, number, channel
        self.report = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `kill`)
        self.exit: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # how it ended
        self.num_calls = 0
        self.limit = asyncio.timeout(None)  # of the call that is open
        self.left_s: float | None = None  # of an agent's time when its clock was stopped
        self.is_closed = False

    async def ask(self, kind: str, payload: Any) -> Answer:
        """Send a message and wait for its answer.

        Raises:
            ProcessEndedError: It ended, or sent something else.
        """
        await self._channel.send(pickle.dumps((kind, payload)))
        try:
            answer = await self._channel.receive()
        except BadMessageError as error:
            raise ProcessEndedError(str(error)) from error
        except (EOFError, OSError):
            raise ProcessEndedError(await self._ending()) from None
        if not isinstance(answer, Answer):
            raise ProcessEndedError("wrote to the connection of its pool")
        self.num_calls += 1
        return answer

    def has_ended(self) -> bool:
        """Return whether it has ended; asked between calls, when it sends nothing."""
        return self._channel.has_input()

    async def describe_place(self, path: str) -> str:
        """Say which line of the user's file `path` it is at, by the stacks that faulthandler writes."""
        before = os.fstat(self.report.fileno()).st_size
        await self.host.send(STACKS, 0, self.number)
        frames = frames_of(await whole_stacks(lambda: self._read_report(before)))
        own = next((frame for frame in frames if frame[0] == path), None)
        if own is not None:
            return "it is at {}:{}, in {}".format(*own)
        shown = "\n".join(f"  {file}:{line}, in {name}" for file, line, name in frames[:SHOWN_FRAMES])
        return f"it is outside of {path}, at\n{shown}"

    def crash_report(self) -> str:
        """Return what Python wrote when it crashed."""
        return "" if self.is_closed else self._read_report(0)

    async def kill(self) -> None:
        """Have the host kill it, unless it has ended. Safe to call twice."""
        if self.is_closed:
            return
        self.is_closed = True
        self._channel.close()
        self.report.close()
        if not self.exit.done():
            await self.host.send(KILL, 0, self.number)

    async def _ending(self) -> str:
        try:
            async with asyncio.timeout(EXIT_WAIT_S):
                return await asyncio.shield(self.exit)
        except TimeoutError:
            return "stopped answering"

    def _read_report(self, start: int) -> str:
        return os.pread(self.report.fileno(), 1 << 16, start).decode(errors="replace")


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
