# SPDX-License-Identifier: Apache-2.0
"""Host process of the tools: imports them once, and forks for each conversation or call.

A fork takes milliseconds and shares what was loaded, so that hundreds of conversations can have their own.
"""

import asyncio
import os
import resource
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from verl.agents.environments.loading import load_environments
from verl.agents.harnesses.loading import load_agents
from verl.agents.tools.loading import LoadedTool, load_tools
from verl.agents.tools.tool_server import EnvironmentServer, ToolServer
from verl.config.multi_turn import MultiTurnConfig
from verl.utils.processes.child_process import ChildEndedError, ChildProcess, Serve, frames_of
from verl.utils.processes.fork_server import ForkServer
from verl.utils.processes.serving import PoolBrokenError, ProcessEndedError, ServingProcess
from verl.utils.registry import HEADING
from verl.utils.user_file import describe_error

SERVERS = {"tool": ToolServer, "environment": EnvironmentServer, "agent": ToolServer}
LOAD_TIMEOUT_S = 300.0  # to import the files of the tools: they may load an index, or import torch
WATCH_POLL_S = 0.1
HOST_NAME = "the process that all tools have in common"
MAX_FILES = 1 << 16  # open files: each process has three
SHOWN_FRAMES = 5


class ToolFacts(NamedTuple):
    """A loaded tool as the pool knows it."""

    name: str
    is_stateful: bool
    path: str
    kind: str = "tool"  # or environment, or agent


class ToolHost:
    """The process of the tools and its forks, as the pool's event loop sees them."""

    def __init__(self, options: MultiTurnConfig) -> None:
        _raise_file_limit()
        self._tools = LoadedTools(options)
        self._forks = ForkServer(self._tools, ChildProcess.start, HOST_NAME, guarded=True)
        self._child = self._forks.start()

    async def load(self) -> list[ToolFacts]:
        """Wait until the tools are loaded.

        Raises:
            PoolBrokenError: One of them cannot be loaded.
        """
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                process = await self._fork(self._tools.tell)
                loaded = await process.ready()
                process.close()
        except TimeoutError:
            stacks = await self._child.stacks()
            problem = f"importing the tools took over {LOAD_TIMEOUT_S:g} s\n{stacks}"
            raise PoolBrokenError(RuntimeError(problem)) from None
        except (ChildEndedError, ProcessEndedError):
            how = self._child.describe_end()
            problem = f"the process that imports the tools {how}\n{self._child.crash_report()}"
            raise PoolBrokenError(RuntimeError(problem)) from None
        if isinstance(loaded, str):
            raise PoolBrokenError(RuntimeError(loaded))
        return loaded

    async def watch(self) -> None:
        """Wait for the end of the process, and with it of all its forks."""
        while not self._child.has_ended():
            await asyncio.sleep(WATCH_POLL_S)

    async def fork(self, tool: ToolFacts) -> "ToolProcess":
        """Start a process for a tool."""
        return await self._fork(partial(self._tools.serve, tool.name))

    def close(self) -> None:
        """Kill the process and all its forks."""
        self._forks.close()

    async def _fork(self, serve: Serve) -> "ToolProcess":
        return ToolProcess(await asyncio.to_thread(self._forks.fork, serve))


class ToolProcess(ServingProcess):
    """A process of one tool; it has one call at a time."""

    def __init__(self, child: ChildProcess) -> None:
        super().__init__(child)
        self.num_calls = 0
        self.limit = asyncio.timeout(None)  # of the call that is open
        self.left_s: float | None = None  # of an agent's time when its clock was stopped

    async def describe_place(self, path: str) -> str:
        """Say which line of the user's file `path` it is at."""
        frames = frames_of(await self.child.stacks())
        own = next((frame for frame in frames if frame[0] == path), None)
        if own is not None:
            return "it is at {}:{}, in {}".format(*own)
        shown = "\n".join(f"  {file}:{line}, in {name}" for file, line, name in frames[:SHOWN_FRAMES])
        return f"it is outside of {path}, at\n{shown}"


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# The rest is in the host, and in its forks.


class LoadedTools:
    """The tools of a config, loaded where this is unpickled: the state of a `ForkServer`."""

    def __init__(self, options: MultiTurnConfig) -> None:
        self.options = options

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the pool is the parallelism
        options = self.options
        try:
            tools = [*load_tools(options), *load_environments(options), *load_agents(options)]
            self.servers = {tool.name: SERVERS[tool.kind](tool, _built(tool), options) for tool in tools}
        except (ValueError, OSError) as error:
            self.loaded: list[ToolFacts] | str = str(error)
        else:
            self.loaded = [
                ToolFacts(tool.name, tool.is_stateful, str(tool.path), tool.kind) for tool in tools
            ]

    def tell(self, connection: Connection) -> None:
        """Send the facts of all tools, or why they cannot be loaded."""
        connection.send((0, self.loaded))

    def serve(self, name: str, connection: Connection) -> None:
        """Answer the calls of a tool, in a fork of the host."""
        self.servers[name].serve(connection)


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
