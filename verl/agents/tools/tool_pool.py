# SPDX-License-Identifier: Apache-2.0
"""A pool of processes in which tools run, next to a rollout engine.

    with ToolPool(config.worker.rollout.multi_turn) as pool:
        pool.start(key, row)                                 # a conversation
        pool.submit(key, calls)                              # those of one turn; they run at once
        for key, observations in pool.ready(0.1):            # in the order of their completion
            ...
        pool.end(key)

For an environment, `reset` and `step` take the place of `submit`; it is a state that every conversation has.

An agent is a member with one long call. Its time is limited from one turn of the policy to the next: `hold`
stops the clock, and `release` starts it.

A tool without a state runs on up to `tool_concurrency` processes. A tool with one has a process for each
conversation that calls it, forked at its first call. A call that hangs is killed with its process, and
all that it started: nothing but that state is lost. The next call of that conversation makes a new one.
"""

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from verl.agents.interface import Observation, ToolCall
from verl.agents.tools.host import HOST_NAME, ToolFacts, ToolHost, ToolProcess
from verl.agents.tools.tool_server import Answer
from verl.config.multi_turn import MultiTurnConfig
from verl.utils.processes.child_process import ChildEndedError
from verl.utils.processes.serving import PoolBrokenError, ProcessEndedError, ServingThread, taken
from verl.utils.rank_logger import get_logger

CLOSE_LIMIT_S = 10.0  # for a tool to release the state of a conversation
MAX_HOST_ENDS = 3  # without a call that was answered in between, that end the pool
MAX_REPORTS = 3  # failures of a tool that are logged in full; others are counted
FAILED = {"tool": "a tool", "environment": "the environment", "agent": "the agent"}  # in warnings
LOST_STATES = {  # what follows when the process of a state has ended
    "tool": "; its state is lost, a further call begins with a new one",
    "environment": "; its state is lost",
    "agent": "",
}

Finished = tuple[Hashable, list[Observation]]
Messages = list[tuple[str, Any]]  # to the process of a tool
Requests = list[tuple[ToolFacts, Messages]]
logger = get_logger(__name__, all_ranks=True)


@dataclass(eq=False)
class _Conversation:
    row: Mapping[str, Any]
    processes: dict[str, ToolProcess] = field(default_factory=dict)  # by the name of a tool with a state
    locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    turns: set[asyncio.Task[None]] = field(default_factory=set)


class ToolPool(AbstractContextManager["ToolPool"]):
    """Runs the calls of many conversations.

    Raises:
        ValueError: A tool cannot be loaded; the message names file, tool, rule and remedy.
    """

    def __init__(self, options: MultiTurnConfig) -> None:
        self.options = options
        self.tools: dict[str, ToolFacts] = {}
        self._conversations: dict[Hashable, _Conversation] = {}
        self._idle: dict[str, list[ToolProcess]] = defaultdict(list)
        # With None once the pool has ended.
        self._finished: SimpleQueue[tuple[_Conversation, Finished] | None] = SimpleQueue()
        self._reports: Counter[str] = Counter()
        self._ends: set[asyncio.Task[None]] = set()
        self._is_loaded = threading.Event()
        self._num_host_ends = 0
        self._is_up = asyncio.Event()
        self._slots = asyncio.Semaphore(options.tool_concurrency)
        self._thread = ServingThread("the pool of tools", self._keep_host(), self._note_end)
        self._is_loaded.wait()
        if self._thread.ended is not None:
            raise ValueError(str(self._thread.ended))

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, key: Hashable, row: Mapping[str, Any]) -> None:
        """Begin a conversation; each tool with a state is made from its row, which is pickled for it."""
        if key in self._conversations:
            raise ValueError(f"conversation {key!r} has started already")
        self._conversations[key] = _Conversation(row)

    def submit(self, key: Hashable, calls: Sequence[ToolCall]) -> None:
        """Make the calls of a turn. Calls to the same state run one after another, others at once.

        Raises:
            KeyError: There is no tool of that name.
        """
        self._answer_soon(key, [(self.tools[call.name], [("call", call.arguments)]) for call in calls])

    def reset(self, key: Hashable) -> None:
        """Begin the environment of a conversation; its observation has the messages of the prompt, if any."""
        [environment] = self.tools.values()
        self._answer_soon(key, [(environment, [])])

    def step(self, key: Hashable, text: str, calls: Sequence[ToolCall]) -> None:
        """Have the environment of a conversation answer a turn; one with a lost state is `done`."""
        [environment] = self.tools.values()
        self._answer_soon(key, [(environment, [("call", (text, tuple(calls)))])])

    def ready(self, timeout_s: float) -> list[Finished]:
        """Return the turns whose calls have all been answered; wait for one for at most `timeout_s`.

        Each has its key, and an observation for each call in order. For an environment it is one observation.

        Raises:
            RuntimeError: The pool has ended.
        """
        items = taken(self._finished, timeout_s)
        found = [
            finished
            for conversation, finished in filter(None, items)
            if self._conversations.get(finished[0]) is conversation  # else it was ended meanwhile
        ]
        if None in items:
            self._finished.put(None)
            if not found:
                raise RuntimeError(str(self._thread.ended))
        return found

    def end(self, key: Hashable) -> None:
        """End a conversation: release its states and drop its open calls."""
        self._thread.call(self._end, self._conversations.pop(key))

    def hold(self, key: Hashable) -> None:
        """Stop the clock of an agent that waits for the policy; it may have ended."""
        conversation = self._conversations.get(key)
        if conversation is not None:
            self._thread.call(self._hold, conversation)

    def release(self, key: Hashable, *, has_turn: bool) -> None:
        """Start the clock of an agent again; it has all its time again only after a turn of the policy."""
        self._thread.call(self._release_clock, self._conversations[key], has_turn)

    def close(self) -> None:
        """Kill every process, once ended conversations have released their states. Safe to call twice."""
        self._thread.close()

    def _answer_soon(self, key: Hashable, requests: Requests) -> None:
        self._thread.call(self._submit, key, self._conversations[key], requests)

    # Everything below runs on the pool's own thread.

    def _note_end(self, _: Exception) -> None:
        self._finished.put(None)
        self._is_loaded.set()

    async def _keep_host(self) -> None:
        """Start the host of the tools, and another one when it ends."""
        while True:
            self._host = ToolHost(self.options)
            try:
                self.tools = {tool.name: tool for tool in await self._host.load()}
                self._is_loaded.set()
                self._is_up.set()
                await self._host.watch()
                self._note_host_end()
            except asyncio.CancelledError:
                if self._ends:  # while the host is there
                    await asyncio.wait(self._ends, timeout=CLOSE_LIMIT_S)
                raise
            finally:
                self._is_up.clear()
                self._host.close()

    def _note_host_end(self) -> None:
        logger.warning("%s ended; all their states are lost", HOST_NAME)
        self._idle.clear()
        self._num_host_ends += 1
        if self._num_host_ends >= MAX_HOST_ENDS:
            problem = (
                f"{HOST_NAME} ended {MAX_HOST_ENDS} times, and no call was answered in between: is a tool"
                " killing processes that it did not start, or is memory full?"
            )
            raise PoolBrokenError(RuntimeError(problem))

    def _submit(self, key: Hashable, conversation: _Conversation, requests: Requests) -> None:
        turn = asyncio.create_task(self._answer_turn(key, conversation, requests))
        conversation.turns.add(turn)
        turn.add_done_callback(conversation.turns.discard)

    def _end(self, conversation: _Conversation) -> None:
        for turn in conversation.turns:
            turn.cancel()
        if conversation.turns or conversation.processes:
            end = asyncio.create_task(self._release(conversation))
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    def _hold(self, conversation: _Conversation) -> None:
        for process in conversation.processes.values():
            end = process.limit.when()
            with suppress(RuntimeError):  # its call has ended
                process.limit.reschedule(None)
            if end is not None:
                process.left_s = end - asyncio.get_running_loop().time()

    def _release_clock(self, conversation: _Conversation, has_turn: bool) -> None:
        for process in conversation.processes.values():
            left_s = self.options.tool_timeout_s if has_turn else process.left_s
            if left_s is not None:
                with suppress(RuntimeError):  # its call has ended
                    process.limit.reschedule(asyncio.get_running_loop().time() + left_s)

    async def _answer_turn(self, key: Hashable, conversation: _Conversation, requests: Requests) -> None:
        answers = [self._settled(conversation, *request) for request in requests]
        self._finished.put((conversation, (key, list(await asyncio.gather(*answers)))))

    async def _settled(self, conversation: _Conversation, tool: ToolFacts, messages: Messages) -> Observation:
        """Make a call; an error that no rule foresees ends its conversation, which would wait for ever."""
        try:
            return await self._answer(conversation, tool, messages)
        except Exception as error:
            logger.exception("a call could not be made")
            return Observation(f"the call could not be made: {error!r}", failed=True, done=True)

    async def _answer(self, conversation: _Conversation, tool: ToolFacts, messages: Messages) -> Observation:
        if tool.kind == "agent":  # it mostly waits for the policy
            return await self._ask_state(conversation, tool, messages)
        if not tool.is_stateful:
            async with self._slots:
                return await self._ask_any(tool, messages)
        async with conversation.locks[tool.name], self._slots:
            observation = await self._ask_state(conversation, tool, messages)
        is_lost = messages and tool.name not in conversation.processes
        return replace(observation, done=True) if tool.kind == "environment" and is_lost else observation

    async def _ask_any(self, tool: ToolFacts, messages: Messages) -> Observation:
        """Send messages to a process that is idle, or to a new one."""
        idle = self._idle[tool.name]
        while idle and idle[-1].has_ended():  # it was killed while it waited
            idle.pop().close()
        process = idle.pop() if idle else await self._fork(tool)
        answer = await self._ask(tool, process, messages)
        if answer.is_memory_full:
            process.close()
        if not process.is_closed:
            self._idle[tool.name].append(process)
        return answer.observation

    async def _ask_state(
        self, conversation: _Conversation, tool: ToolFacts, messages: Messages
    ) -> Observation:
        """Send messages to the process of a state, which is made first if there is none."""
        process = conversation.processes.get(tool.name)
        if process is None or process.is_closed:
            process = conversation.processes[tool.name] = await self._fork(tool)
            messages = [("create", dict(conversation.row)), *messages]
        answer = await self._ask(tool, process, messages)
        if answer.observation.failed and messages[0][0] == "create" and process.num_calls <= 1:
            process.close()  # there is no state
        if process.is_closed:
            conversation.processes.pop(tool.name, None)
        return answer.observation

    async def _ask(self, tool: ToolFacts, process: ToolProcess, messages: Messages) -> Answer:
        """Send messages until one fails, and kill a process that hangs or died."""
        begin, limit_s = time.monotonic(), self.options.tool_timeout_s
        answer = Answer(Observation())
        try:
            async with asyncio.timeout(limit_s) as process.limit:
                for kind, payload in messages:
                    answer = await process.ask((kind, payload))
                    process.num_calls += 1
                    self._num_host_ends = 0
                    if answer.observation.failed:
                        break
        except TimeoutError:
            where = await process.describe_place(tool.path)
            is_agent = tool.kind == "agent"
            missed = "neither returned nor had a turn of the policy" if is_agent else "did not answer"
            answer = self._lost(tool, f"{missed} within {limit_s:g} s", f": {where}")
            process.close()
        except ProcessEndedError as error:
            answer = self._lost(tool, str(error), f"\n{error.report}".rstrip())
            process.close()
        except BaseException:
            process.close()  # a late answer would be taken for that of the next call
            raise
        if answer.report:
            self._log(tool.name, answer.report)
        seconds = time.monotonic() - begin
        return answer._replace(observation=replace(answer.observation, seconds=seconds))

    async def _fork(self, tool: ToolFacts) -> ToolProcess:
        while True:
            await self._is_up.wait()
            host = self._host
            try:
                return await host.fork(tool)
            except ChildEndedError:  # another one starts
                if host is self._host:
                    self._is_up.clear()

    async def _release(self, conversation: _Conversation) -> None:
        await asyncio.gather(*conversation.turns, return_exceptions=True)
        states = conversation.processes.items()
        await asyncio.gather(*[self._close_state(*state) for state in states if not state[1].is_closed])

    async def _close_state(self, name: str, process: ToolProcess) -> None:
        try:
            async with asyncio.timeout(min(CLOSE_LIMIT_S, self.options.tool_timeout_s)):
                answer = await process.ask(("close", None))
            if answer.report:
                self._log(name, f"{answer.report}when a conversation ended")
        except (TimeoutError, ProcessEndedError) as error:
            how = "did not return in time" if isinstance(error, TimeoutError) else error
            self._log(name, f"`close` of `{name}` {how}")
        finally:
            process.close()

    def _lost(self, tool: ToolFacts, how: str, details: str) -> Answer:
        state = LOST_STATES[tool.kind] if tool.is_stateful else ""
        return Answer(Observation(f"{tool.name} {how}{state}", failed=True), f"`{tool.name}` {how}{details}")

    def _log(self, name: str, report: str) -> None:
        self._reports[name] += 1
        if self._reports[name] <= MAX_REPORTS:
            last = " (any more are only counted)" if self._reports[name] == MAX_REPORTS else ""
            logger.warning("%s failed%s: %s", FAILED[self.tools[name].kind], last, report)
