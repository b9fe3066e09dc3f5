# SPDX-License-Identifier: Apache-2.0
"""Serve a tool or an environment inside its process: create a state, answer calls, release it.

Messages on the connection, each with one answer:

    in    (number, ("create", row)), (number, ("call", arguments)), (number, ("close", None))
    out   (number, Answer)
"""

import asyncio
import inspect
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from verl.agents.interface import CallRefusedError, Observation
from verl.agents.tools.answers import AnswerLimits, BadAnswerError, as_observation, as_opening, as_step
from verl.agents.tools.loading import LoadedTool
from verl.config.multi_turn import MultiTurnConfig
from verl.utils.processes.child_process import limit_memory, offer_to_kill
from verl.utils.registry import HEADING
from verl.utils.user_file import describe_error, shorten

GIB = 1 << 30
MAX_REASON = 1000  # characters of an error that the policy reads


class Answer(NamedTuple):
    """The answer to one message."""

    observation: Observation
    report: str = ""  # for the log: the error with its line and traceback
    is_memory_full: bool = False


class ToolServer:
    """Answers the calls of one tool, of one conversation if the tool has a state."""

    def __init__(self, loaded: LoadedTool, tool: Any, options: MultiTurnConfig) -> None:
        self.name, self.path, self.is_stateful = loaded.name, loaded.path, loaded.is_stateful
        self.tool, self.memory_limit_gb = tool, options.tool_memory_limit_gb
        self.limits = AnswerLimits.from_options(options)
        self.state: Any = None

    def serve(self, connection: Connection) -> None:
        """Answer until the connection closes."""
        offer_to_kill()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._loop = asyncio.new_event_loop()  # one for all calls: a client of a tool stays usable
        asyncio.set_event_loop(self._loop)
        self._unlimited = resource.getrlimit(resource.RLIMIT_DATA)
        limit_memory(int(self.memory_limit_gb * GIB))
        self._limited = resource.getrlimit(resource.RLIMIT_DATA)
        answers = {"create": self._create, "call": self._call, "close": self._close}
        with suppress(EOFError, ConnectionError):
            while True:
                number, (kind, payload) = connection.recv()
                connection.send((number, self._answer(answers[kind], payload)))

    def _answer(self, function: Callable[[Any], Observation], payload: Any) -> Answer:
        try:
            return Answer(function(payload))
        except CallRefusedError as error:
            return Answer(Observation(shorten(str(error), MAX_REASON // 2, MAX_REASON // 2)))
        except BadAnswerError as error:
            reason = f"{self.name} returned {error}"
            return Answer(Observation(reason, failed=True), f"`{self.name}` of {self.path} returned {error}")
        except BaseException as error:  # noqa: BLE001 (a user's code raises anything)
            resource.setrlimit(resource.RLIMIT_DATA, self._unlimited)  # describing an error takes memory
            report = f"`{self.name}` raised {describe_error(error, self.path, HEADING)}"
            failure = Observation(self._reason(error), failed=True)
            resource.setrlimit(resource.RLIMIT_DATA, self._limited)
            return Answer(failure, report, isinstance(error, MemoryError))

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            limit = f"{self.memory_limit_gb:g} GiB"
            return f"{self.name} failed: it needs more than the {limit} of memory that it may use"
        what = shorten(f"{type(error).__name__}: {error}", MAX_REASON // 2, MAX_REASON // 2)
        return f"{self.name} failed: {what}"

    def _create(self, row: Any) -> Observation:
        self.state = self._run(self.tool.create, row)
        return Observation()

    def _call(self, arguments: dict[str, Any]) -> Observation:
        state = (self.state,) if self.is_stateful else ()
        return as_observation(self._run(self.tool, *state, **arguments), self.limits)

    def _close(self, _: None) -> Observation:
        if hasattr(self.tool, "close"):
            self._run(self.tool.close, self.state)
        return Observation()

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


class EnvironmentServer(ToolServer):
    """Leads the environment of one conversation; `tool` makes it from the columns of a row."""

    def _create(self, row: Mapping[str, Any]) -> Observation:
        self.state = self.tool(row)
        try:
            return as_opening(self._run(self.state.reset, row))
        except BaseException:
            with suppress(Exception):  # it is reported with what `reset` raised
                self._close(None)
            raise

    def _call(self, step: Any) -> Observation:
        text, calls = step
        return as_step(self._run(self.state.step, text, list(calls)), self.limits)

    def _close(self, _: None) -> Observation:
        self._run(self.state.close)
        return Observation()
