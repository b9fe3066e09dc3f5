# SPDX-License-Identifier: Apache-2.0
"""The first rank of an engine with agents: it takes their calls, and decides what all ranks do next."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from verl.agents.agent_conversation import AgentConversation
from verl.agents.contexts import OpenCall
from verl.agents.endpoint.chat_messages import ApiError
from verl.agents.endpoint.server import MODEL, Endpoint, IncomingCall
from verl.agents.harnesses.loading import AGENT
from verl.agents.interface import AgentResult, StopReason, ToolCall
from verl.agents.rules import ConversationRules
from verl.agents.tools.tool_pool import ToolPool
from verl.data.media.references import MediaData
from verl.utils.rank_logger import get_logger
from verl.workers.conversations.keys import (
    Columns,
    Key,
    columns_of,
    finished_response,
    sampled_turn,
    stop_problem,
)
from verl.workers.rollout.interface import Drafts, FinishedResponse, join_drafts

WAIT_S = 0.02  # for a call, while the engine has nothing to do
MAX_REPORTS = 3  # agents without a turn that are logged; others are only counted

logger = get_logger(__name__, all_ranks=True)


class CallId(NamedTuple):
    """A call among those of all conversations."""

    key: Key
    number: int


class Turn(NamedTuple):
    """A turn to sample."""

    uid: CallId
    token_ids: list[int]
    media: MediaData
    max_tokens: int


@dataclass
class Step:
    """Work of all ranks of an engine before its next steps."""

    turns: list[Turn] = field(default_factory=list)
    aborted: list[CallId] = field(default_factory=list)
    ended: list[FinishedResponse] = field(default_factory=list)
    problem: str | None = None  # ends the run


@dataclass(eq=False)
class _Run:
    """A conversation and its calls."""

    conversation: AgentConversation
    started: float  # by the leader's clock, without the time that it was parked
    waiting: list[IncomingCall] = field(default_factory=list)  # for room
    calls: dict[int, tuple[IncomingCall, OpenCall]] = field(default_factory=dict)  # by number, being sampled
    is_held: bool = False  # the agent's clock is stopped
    has_turn: bool = False  # since the clock was stopped
    result: AgentResult | None = None  # of an agent that has ended
    drafts: Drafts | None = None  # of the turns that it was answered with


class AgentLeader:
    """The conversations of an engine, on its first rank."""

    def __init__(
        self,
        pool: ToolPool,  # in which agents run
        endpoint: Endpoint,  # that they call
        rules: ConversationRules,
        decode_media: Callable[[MediaData], Any],  # to what the engine reads
    ) -> None:
        self.pool, self.endpoint, self.rules, self.decode_media = pool, endpoint, rules, decode_media
        self.options = rules.options
        self.decoded: dict[CallId, Any] = {}  # media of turns to submit
        self._runs: dict[Any, _Run] = {}  # by `Key`
        self._parked: dict[Any, _Run] = {}
        self._num_reports = 0

    def start(self, key: Key, row: Columns, seed: int | None) -> None:
        self._runs[key] = _Run(AgentConversation(self.rules, row["prompt_messages"]), time.monotonic())
        self.pool.start(key, columns_of(self.rules, key, row, seed))
        api_key = self.endpoint.open(key)
        address = {"base_url": self.endpoint.base_url, "api_key": api_key, "model": MODEL}
        self.pool.submit(key, [ToolCall(AGENT, address)])

    def park(self) -> None:
        now = time.monotonic()
        for run in self._runs.values():
            run.started -= now  # minus what has passed
        self._parked |= self._runs
        self._runs = {}

    def resume(self, keys: Iterable[Key]) -> None:
        now = time.monotonic()
        for key in keys:
            run = self._runs[key] = self._parked.pop(key)
            run.started += now

    def take(self, turn: FinishedResponse) -> None:
        """Answer the call of a turn that was sampled."""
        key, number = turn.uid
        run = self._runs[key]
        incoming, call = run.calls.pop(number)
        run.drafts = join_drafts(run.drafts, turn.drafts)
        try:
            reply = run.conversation.complete(call, sampled_turn(turn), _at(run))
        except Exception as error:  # noqa: BLE001
            self._break_off(run, incoming, error)
            return
        incoming.answer(reply)
        run.has_turn = True

    def next(self, is_sampling: bool) -> Step:
        """Return what came since the last steps of the engine."""
        step = Step()
        for incoming in self.endpoint.take(0.0 if is_sampling else WAIT_S):
            run = self._runs.get(incoming.key) or self._parked.get(incoming.key)
            if run is None:
                incoming.refuse(_ended())
            else:
                run.waiting.append(incoming)
                run.is_held = True  # by the endpoint, when the call came
        for key, run in self._runs.items():
            self._drop_gone(key, run, step)
        for key, [answer] in self.pool.ready(0.0):
            run = self._runs.get(key) or self._parked[key]
            if not isinstance(answer, AgentResult):
                answer = AgentResult(answer.text, failed=True)
            run.result = run.result or answer
        limit_s = self.options.max_seconds
        for key, run in list(self._runs.items()):
            if run.result is not None:
                self._end(key, run.result, step)
            elif limit_s is not None and _at(run) >= limit_s:
                self._end(key, AgentResult(), step, StopReason.SECONDS)
        for key, run in self._runs.items():
            self._begin_calls(key, run, step)
            self._set_clock(key, run)
        return step

    def stop(self, keys: Iterable[Key]) -> None:
        """End conversations that have not ended."""
        for key in keys:
            run = self._runs.pop(key, None) or self._parked.pop(key)
            self._close(key, run)

    def close(self) -> None:
        """End the processes of the agents, and their endpoint."""
        self.pool.close()
        self.endpoint.close()

    def _drop_gone(self, key: Key, run: _Run, step: Step) -> None:
        run.waiting = [incoming for incoming in run.waiting if not incoming.is_gone]
        for number, (incoming, call) in list(run.calls.items()):
            if incoming.is_gone:
                del run.calls[number]
                run.conversation.cancel(call)
                step.aborted.append(CallId(key, number))

    def _begin_calls(self, key: Key, run: _Run, step: Step) -> None:
        waiting, run.waiting = run.waiting, []
        for incoming in waiting:
            try:
                call = run.conversation.begin(incoming.request, _at(run))
            except ApiError as error:
                incoming.refuse(error)
                continue
            except Exception as error:  # noqa: BLE001
                self._break_off(run, incoming, error)
                continue
            if call is None:
                run.waiting.append(incoming)
                continue
            uid = CallId(key, call.number)
            turn = Turn(uid, call.token_ids, call.media, call.max_tokens)
            try:
                self.decoded[uid] = self.decode_media(turn.media)
            except (ValueError, OSError) as error:
                run.conversation.cancel(call)
                incoming.refuse(ApiError(f"a medium cannot be read: {error}", param="messages"))
                continue
            run.calls[call.number] = (incoming, call)
            step.turns.append(turn)

    def _break_off(self, run: _Run, incoming: IncomingCall, error: Exception) -> None:
        """Have an error that no rule foresees end one conversation, and not the engine with all others."""
        logger.error("a call of an agent failed", exc_info=error)
        incoming.refuse(ApiError(f"the call failed: {error!r}", status=500, code="internal_error"))
        run.result = AgentResult(f"a call of the policy failed: {error!r}", failed=True)

    def _set_clock(self, key: Key, run: _Run) -> None:
        """Limit the agent's own time, between its turns; calls that are refused or dropped give it none."""
        waits = bool(run.waiting or run.calls)
        if waits == run.is_held:
            return
        run.is_held = waits
        if waits:
            self.pool.hold(key)
        else:
            self.pool.release(key, has_turn=run.has_turn)
            run.has_turn = False

    def _end(self, key: Any, result: AgentResult, step: Step, reason: StopReason = StopReason.STOP) -> None:
        run = self._runs.pop(key)
        step.aborted += [CallId(key, number) for number in run.calls]
        self._close(key, run)
        if reason is StopReason.STOP:
            result = self._checked(run.conversation, result)
        if result.failed:
            result = replace(result, seconds=_at(run) - run.conversation.turn_ended_at)
        if result.failed and self.options.on_tool_error == "stop":
            step.problem = stop_problem("an agent", result.text)
        is_masked = result.failed and self.options.on_tool_error == "end"
        done = run.conversation.finish(result, reason, is_masked)
        step.ended.append(finished_response(key, done, run.drafts))

    def _checked(self, conversation: AgentConversation, result: AgentResult) -> AgentResult:
        """Return a result, failed if it does not fit the conversation."""
        problem, turns, rewards = None, conversation.num_turns, len(result.turn_rewards)
        if turns == 0 and not result.failed:
            problem = "the agent returned without a turn of the policy"
        elif rewards > turns:
            problem = f"the agent returned {rewards} `turn_rewards` for {turns} turns"
        if problem is None:
            return result
        self._num_reports += 1
        if self._num_reports <= MAX_REPORTS:
            logger.warning("%s", problem)
        return AgentResult(problem, failed=True)

    def _close(self, key: Key, run: _Run) -> None:
        """End the agent's process, and answer all that waits."""
        self.pool.end(key)
        self.endpoint.close_conversation(key)
        for number in run.calls:
            self.decoded.pop(CallId(key, number), None)
        for incoming in (*run.waiting, *(incoming for incoming, _ in run.calls.values())):
            incoming.refuse(_ended())


def _at(run: _Run) -> float:
    return time.monotonic() - run.started


def _ended() -> ApiError:
    return ApiError("the conversation has ended", status=401, code="invalid_api_key")
