# SPDX-License-Identifier: Apache-2.0
"""Host process of the tools: imports them once, and forks for each conversation or call.

A fork takes milliseconds and shares what was loaded, so that hundreds of conversations can have their own.
Requests are records of a fixed size; a fork's comes with the files of its connection and of its stacks:

    in    operation, index of the tool, number of the process
    out   Loaded or LoadFailure, once; then (number, exit code) for each process that ended
"""

import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from verl.agents.environments.loading import load_environments
from verl.agents.harnesses.loading import load_agents
from verl.agents.tools.answers import AnswerLimits
from verl.agents.tools.loading import LoadedTool, load_tools
from verl.agents.tools.tool_server import EnvironmentServer, ToolServer
from verl.config.multi_turn import MultiTurnConfig
from verl.utils.processes.child_process import FIRST_TO_KILL, STACK_SIGNAL, become_child
from verl.utils.registry import HEADING
from verl.utils.user_file import describe_error

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # the pool is the parallelism
REQUEST = struct.Struct("!cIQ")
SERVERS = {"tool": ToolServer, "environment": EnvironmentServer, "agent": ToolServer}
FORK, KILL, STACKS = b"F", b"K", b"S"
GIB = 1 << 30


class ToolFacts(NamedTuple):
    """A loaded tool as the pool knows it."""

    name: str
    is_stateful: bool
    path: str
    kind: str = "tool"  # or environment, or agent


class Loaded(NamedTuple):
    """All tools are loaded."""

    tools: list[ToolFacts]


class LoadFailure(NamedTuple):
    """A tool cannot be loaded."""

    message: str


def host_tools(options: MultiTurnConfig, connection: Connection) -> None:
    """Load the tools and fork their processes until the connection closes."""
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    limits, memory_bytes = AnswerLimits.from_options(options), int(options.tool_memory_limit_gb * GIB)
    try:
        members = [*load_tools(options), *load_environments(options), *load_agents(options)]
        servers = [
            SERVERS[tool.kind](
                tool.name,
                _built(tool),
                tool.path,
                is_stateful=tool.is_stateful,
                limits=limits,
                memory_bytes=memory_bytes,
            )
            for tool in members
        ]
    except (ValueError, OSError) as error:
        connection.send(LoadFailure(str(error)))
        return
    facts = [ToolFacts(tool.name, tool.is_stateful, str(tool.path), tool.kind) for tool in members]
    connection.send(Loaded(facts))
    _Host(connection, servers).run()


def _built(tool: LoadedTool) -> Any:
    try:
        return tool.build()
    except (Exception, SystemExit) as error:
        reason = describe_error(error, tool.path, HEADING)
        option = f"worker.rollout.multi_turn.{tool.kind}_kwargs"
        name = f".{tool.name}" if tool.kind == "tool" else ""
        raise ValueError(
            f"`{option}{name}`: making the {tool.kind} of {tool.path} failed: {reason}"
        ) from error


class _Host:
    def __init__(self, connection: Connection, servers: Sequence[ToolServer]) -> None:
        self.connection, self.servers = connection, servers
        self.socket = socket.socket(fileno=os.dup(connection.fileno()))
        self.numbers: dict[int, int] = {}  # of the processes, by that of their guardian
        self.pids: dict[int, int] = {}

    def run(self) -> None:
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        self.wakers = (wake, woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            self.selector = selector
            for file in (wake, self.socket):
                selector.register(file, selectors.EVENT_READ)
            with suppress(EOFError, ConnectionError):
                while True:
                    for key, _ in selector.select():
                        if key.fileobj is wake:
                            wake.recv(1 << 12)
                            self._reap()
                        else:
                            self._take_request()

    def _take_request(self) -> None:
        record, files, _, _ = socket.recv_fds(self.socket, REQUEST.size, 2)
        if len(record) < REQUEST.size:
            raise EOFError
        operation, index, number = REQUEST.unpack(record)
        if operation == FORK:
            self._fork(self.servers[index], number, *files)
        elif number in self.pids:  # else it has ended
            signals = [STACK_SIGNAL] if operation == STACKS else [signal.SIGTERM, signal.SIGCONT]
            for each in signals:
                os.kill(self.pids[number], each)

    def _fork(self, server: ToolServer, number: int, connection: int, report: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_the_tool(server, connection, report, parent)
        os.close(connection)
        os.close(report)
        self.numbers[pid], self.pids[number] = number, pid

    def _be_the_tool(self, server: ToolServer, connection: int, report: int, parent: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            for file in (self.connection, self.socket, *self.wakers):
                file.close()
            own = become_child(connection, report, parent)
            if sys.platform == "linux":
                with suppress(OSError):  # some containers have no such file
                    Path("/proc/self/oom_score_adj").write_text(FIRST_TO_KILL)
            server.serve(own)
            status = 0
        except Exception:  # noqa: BLE001 (the host's loop must not see it)
            traceback.print_exc()
        finally:
            os._exit(status)  # skip what this process does at its own exit

    def _reap(self) -> None:
        for pid in list(self.numbers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                number = self.numbers.pop(pid)
                del self.pids[number]
                self.connection.send((number, os.waitstatus_to_exitcode(status)))


def host_of(options: MultiTurnConfig) -> partial[None]:
    """Return what `ChildProcess.start` takes to host the tools of a config."""
    return partial(host_tools, options)
