# SPDX-License-Identifier: Apache-2.0
"""Agents next to a rollout engine: each leads its conversation in a process of its own and calls the policy.

Calls come by HTTP, in any order. With tensor parallelism the first rank of an engine serves them, and tells
the others what to sample and when, so that all make the same calls of the engine.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from verl.agents.agent_conversation import AgentConversation
from verl.agents.contexts import OpenCall
from verl.agents.endpoint.errors import ApiError
from verl.agents.endpoint.server import MODEL, Endpoint, IncomingCall
from verl.agents.harnesses.loading import AGENT
from verl.agents.interface import AgentResult, Observation, ToolCall
from verl.agents.rules import ConversationRules
from verl.agents.tools.pool import ToolPool
from verl.data.media.loader import MediaData
from verl.utils.rank_logger import get_logger
from verl.workers.rollout.base import FinishedResponse, RolloutEngine, RolloutRequest, SamplingOptions
from verl.workers.rollout.conversations import (
    Columns,
    Key,
    columns_of,
    finished_response,
    seed_offset,
    stop_problem,
)

WAIT_S = 0.02  # for a call, while the engine has nothing to do
STEPS = 4  # of the engine, after which calls are taken
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
    is_last: bool = False


class AgentServices(NamedTuple):
    """The pool in which agents run, and the endpoint that they call."""

    pool: ToolPool
    endpoint: Endpoint


class AgentDriver:
    """Has an agent lead each conversation of a batch of prompts.

    Example::

        driver = AgentDriver(engine, AgentServices(pool, endpoint), rules, decode_media)
        for finished in driver.run(rows, SamplingOptions(n=8)):
            ...
    """

    def __init__(
        self,
        engine: RolloutEngine,
        services: AgentServices | None,  # None on a rank that follows another one's
        rules: ConversationRules,
        decode_media: Callable[[MediaData], Any],  # to what the engine reads
    ) -> None:
        self.engine, self.rules, self.decode_media = engine, rules, decode_media
        self._services = services
        self._leader: _Leader | None = None

    def run(self, rows: Sequence[Columns], sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Lead `sampling.n` conversations for each row and yield them as they end, in any order."""
        leader = self._leader = (
            None if self._services is None else _Leader(self._services, self.rules, self.decode_media)
        )
        sampled: set[CallId] = set()
        one_each = sampling.override({"n": 1})
        try:
            if leader is not None:
                leader.start(rows, sampling.n, sampling.seed)
            while True:
                for turn in self.engine.step(STEPS):
                    sampled.discard(turn.uid)
                    if leader is not None:
                        leader.take(turn)
                step: Step = self.engine.agree(
                    None if leader is None else leader.next(self.engine.num_unfinished > 0)
                )
                self.engine.abort(step.aborted)
                sampled.update(turn.uid for turn in step.turns)
                if step.problem is not None:
                    raise RuntimeError(step.problem)
                self.engine.submit([self._request(turn) for turn in step.turns], one_each)
                if step.ended:
                    yield step.ended
                if step.is_last:
                    return
        finally:
            self.engine.abort(sampled)
            if leader is not None:
                leader.stop()

    def close(self) -> None:
        """End the processes of the agents, and their endpoint."""
        if self._services is not None:
            self._services.pool.close()
            self._services.endpoint.close()

    def _request(self, turn: Turn) -> RolloutRequest:
        decoded = None if self._leader is None else self._leader.decoded.pop(turn.uid, None)
        media = self.decode_media(turn.media) if decoded is None else decoded
        offset = seed_offset(*turn.uid)
        return RolloutRequest(turn.uid, turn.token_ids, media, max_tokens=turn.max_tokens, seed_offset=offset)


@dataclass(eq=False)
class _Run:
    """A conversation and its calls."""

    conversation: AgentConversation
    waiting: list[IncomingCall] = field(default_factory=list)  # for room
    calls: dict[int, tuple[IncomingCall, OpenCall]] = field(default_factory=dict)  # by number, being sampled
    is_held: bool = False  # the agent's clock is stopped
    has_turn: bool = False  # since the clock was stopped


class _Leader:
    """The conversations of a batch, on the first rank of an engine."""

    def __init__(
        self, services: AgentServices, rules: ConversationRules, decode_media: Callable[[MediaData], Any]
    ) -> None:
        self.pool, self.endpoint = services
        self.rules, self.decode_media = rules, decode_media
        self.options = rules.options
        self.decoded: dict[CallId, Any] = {}  # media of turns to submit
        self._runs: dict[Any, _Run] = {}  # by `Key`
        self._started = time.monotonic()
        self._num_reports = 0

    def start(self, rows: Sequence[Columns], n: int, seed: int | None) -> None:
        for row in rows:
            for sample in range(n):
                key = Key(row["uid"], sample)
                self._runs[key] = _Run(AgentConversation(self.rules, row["prompt_messages"]))
                self.pool.start(key, columns_of(self.rules, key, row, seed))
                api_key = self.endpoint.open(key)
                address = {"base_url": self.endpoint.base_url, "api_key": api_key, "model": MODEL}
                self.pool.submit(key, [ToolCall(AGENT, address)])

    def take(self, turn: FinishedResponse) -> None:
        """Answer the call of a turn that was sampled."""
        key, number = turn.uid
        run = self._runs[key]
        incoming, call = run.calls.pop(number)
        reply = run.conversation.complete(call, turn.token_ids, turn.log_probs, turn.finish_reason, self._now)
        incoming.answer(reply)
        run.has_turn = True

    def next(self, is_sampling: bool) -> Step:
        """Return what came since the last steps of the engine."""
        step = Step()
        for incoming in self.endpoint.take(0.0 if is_sampling else WAIT_S):
            run = self._runs.get(incoming.key)
            if run is None:
                incoming.refuse(_ended())
            else:
                run.waiting.append(incoming)
                run.is_held = True  # by the endpoint, when the call came
        for key, run in self._runs.items():
            self._drop_gone(key, run, step)
        for finished in self.pool.ready(0.0):
            key: Any = finished[0]
            self._end(key, self._result(finished[1][0]), step)
        limit_s = self.options.max_seconds
        if limit_s is not None and self._now >= limit_s:
            for key in list(self._runs):
                self._end(key, AgentResult(), step, "seconds")
        for key, run in self._runs.items():
            self._begin_calls(key, run, step)
            self._set_clock(key, run)
        step.is_last = not self._runs
        return step

    def stop(self) -> None:
        """End what has not ended."""
        for key, run in self._runs.items():
            self._close(key, run)
        self._runs = {}

    # --- calls

    @property
    def _now(self) -> float:
        return time.monotonic() - self._started

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
                call = run.conversation.begin(incoming.request, self._now)
            except ApiError as error:
                incoming.refuse(error)
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

    # --- ends

    def _result(self, observation: Observation) -> AgentResult:
        if isinstance(observation, AgentResult):
            return observation
        return AgentResult(observation.text, failed=True)

    def _end(self, key: Any, result: AgentResult, step: Step, reason: str = "stop") -> None:
        run = self._runs.pop(key)
        step.aborted += [CallId(key, number) for number in run.calls]
        self._close(key, run)
        if reason == "stop":
            result = self._checked(run.conversation, result)
        if result.failed:
            result = replace(result, seconds=self._now - run.conversation.turn_ended_at)
        if result.failed and self.options.on_tool_error == "stop":
            step.problem = stop_problem("an agent", result.text)
        is_masked = result.failed and self.options.on_tool_error == "end"
        done = run.conversation.finish(result, reason, is_masked)
        step.ended.append(finished_response(key, done))

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


def _ended() -> ApiError:
    return ApiError("the conversation has ended", status=401, code="invalid_api_key")
