# SPDX-License-Identifier: Apache-2.0
"""Conversations next to a rollout engine: each proceeds while the tools of others work.

A coroutine leads each conversation. What it waits for, turns and answers, arrives in any order. With tensor
parallelism the first rank of an engine runs the tools and tells the others what came and when, so that all
make the same calls of the engine.
"""

import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import coroutine
from typing import Any

from verl.agents.contexts import FinishedConversation
from verl.agents.conversation import Conversation, TurnRequest
from verl.agents.interface import Observation, StopReason, ToolCall
from verl.agents.row import Prompt, Row
from verl.agents.rules import ConversationRules
from verl.agents.tools.tool_pool import ToolPool
from verl.data.media.references import MediaData
from verl.utils.rank_logger import get_logger
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.conversations.keys import (
    Begun,
    Columns,
    Key,
    columns_of,
    finished_response,
    placed,
    sampled_turn,
    samples_of,
    seed_offset,
    stop_problem,
)
from verl.workers.rollout.interface import (
    Drafts,
    FinishedResponse,
    RolloutRequest,
    SamplingOptions,
    join_drafts,
)

WAIT_S = 0.05  # for an answer, while the engine has nothing to do
STEPS = 4  # of the engine, after which it is seen whether an answer has come

logger = get_logger(__name__, all_ranks=True)


@dataclass(eq=False)
class _Open:
    """A conversation on its way, and what it waits for."""

    row: Columns
    started: float  # by the driver's clock, without the time that it was parked
    leader: Coroutine[None, Any, FinishedConversation] = field(init=False)
    finished: FinishedConversation | None = None
    request: TurnRequest | None = None  # of the turn that it waits for; None if it waits for answers
    begun: FinishedResponse | None = None  # the turn, if it was interrupted
    answer: list[Observation] | None = None  # that came while it was parked
    drafts: Drafts | None = None  # of its turns
    media: list[Any] = field(default_factory=list)  # of its turns: what it holds is not processed again

    async def turn(self, request: TurnRequest) -> FinishedResponse:
        self.request = request
        turn = await _resumed()
        self.request = None
        self.drafts = join_drafts(self.drafts, turn.drafts)
        return turn

    async def answers(self) -> list[Observation]:
        answers = await _resumed()
        self.answer = None
        return answers

    def resume(self, value: FinishedResponse | list[Observation] | None = None) -> None:
        """Lead the conversation on to where it waits again, with what it waited for."""
        try:
            self.leader.send(value)
        except StopIteration as end:
            self.finished = end.value


@coroutine
def _resumed() -> Generator[None, Any, Any]:
    """Suspend the conversation until it is resumed, and return with what."""
    return (yield)


class ConversationDriver:
    """Leads conversations with an engine, a batch of them or ones that join at any time.

    Parked conversations wait while other ones have the engine, or training has the device. Their tools work
    on.

    Example::

        driver = ConversationDriver(ContinuedSampling(engine), pool, rules, decode_media)
        for finished in driver.run(rows, SamplingOptions(n=8)):
            ...

    Args:
        in_lockstep: Wait for all answers before the engine continues, so that their times decide nothing.
    """

    def __init__(
        self,
        sampling: ContinuedSampling,
        pool: ToolPool | None,  # None on a rank that follows another one's
        rules: ConversationRules,
        decode_media: Callable[[MediaData], Any],  # to what the engine reads
        *,
        in_lockstep: bool = False,
    ) -> None:
        self.sampling, self.pool, self.rules, self.decode_media = sampling, pool, rules, decode_media
        self.in_lockstep, self.on_tool_error = in_lockstep, rules.options.on_tool_error
        self._open: dict[Key, _Open] = {}
        self._parked: dict[Key, _Open] = {}
        self._options = SamplingOptions()  # of a turn
        self._began, self._now = time.monotonic(), 0.0  # a clock that all ranks of the engine share

    def run(self, rows: Sequence[Columns], sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Lead `sampling.n` conversations for each row and yield them as they end, in any order."""
        assert not self._open, "conversations that join at any time are parked before"
        try:
            self.submit(rows, sampling)
            while self._open:
                ended = self.step(sys.maxsize)
                if ended:
                    yield [placed(response, sampling) for response in ended]
        finally:
            self.sampling.abort([*(row["uid"] for row in rows), *self._open])
            self._end(self._open)

    def submit(self, rows: Sequence[Columns], sampling: SamplingOptions, begun: Begun | None = None) -> None:
        """Begin `sampling.n` conversations for each row, or only those in `begun`; parked ones continue."""
        self._options = replace(sampling, n=1)
        self._agree([])
        whole: list[Columns] = []  # all samples begin
        single: list[Key] = []
        for row in rows:
            keys = samples_of(row, sampling, begun)
            parked = [key for key in keys if key in self._parked]
            for key in keys:
                if key not in self._parked:
                    self._start(key, row, sampling.seed)
            is_whole = len(keys) == sampling.n and not sampling.first_sample
            if is_whole and not parked and not self.rules.has_environment:
                whole.append(row)  # these have the same first request
            else:
                single += keys
        for key in single:
            if key in self._parked:
                opened = self._open[key] = self._parked.pop(key)
                opened.started += self._now
        first = {row["uid"]: self._request(Key(row["uid"], 0), row["uid"]) for row in whole}
        for key, opened in self._open.items():
            if key.uid in first:
                opened.media.append(first[key.uid].media)
        self.sampling.submit(list(first.values()), sampling)
        self._submit(single)

    def step(self, at_most: int) -> list[FinishedResponse]:
        """Run the engine for `at_most` steps, or until a conversation ends; return the ended ones."""
        ended: list[FinishedResponse] = []
        while self._open and at_most > 0 and not ended:
            num_steps = min(at_most, STEPS) if self._num_calling else at_most
            at_most -= num_steps
            touched = self._resume([(key_of(turn), turn) for turn in self.sampling.step(num_steps)])
            touched |= self._resume(self._answers())  # an answer may follow its turn at once
            self._submit(list(touched))
            ended = [self._finish(key) for key in touched if self._open[key].finished is not None]
        return ended

    def interrupt(self) -> list[FinishedResponse]:
        """Park all conversations; `submit` continues them. None of them can continue elsewhere."""
        for response in self.sampling.interrupt():
            key = key_of(response)
            self._open[key].begun = replace(response, uid=key, sample=0)
        self._agree([])
        for opened in self._open.values():
            opened.started -= self._now  # minus what has passed
        self._parked |= self._open
        self._open = {}
        return []

    def forget(self) -> None:
        """End parked conversations, which begin again when they are submitted."""
        self._end(self._parked)

    def close(self) -> None:
        """End the processes of the tools."""
        if self.pool is not None:
            self.pool.close()

    async def _lead(self, key: Key, opened: _Open) -> FinishedConversation:
        """Lead a conversation from its prompt to its end."""
        conversation = await self._begin(key, opened)
        while not conversation.is_done:
            turn = await opened.turn(conversation.request())
            calls = self._add(conversation, turn, self._now - opened.started)
            if conversation.is_waiting:
                self._call(key, conversation, calls)
                answers = await opened.answers()
                self._observe(conversation, answers, self._now - opened.started)
        return conversation.finish()

    async def _begin(self, key: Key, opened: _Open) -> Conversation:
        if not self.rules.has_environment:
            return Conversation(self.rules, self._row_of_prompt(opened.row))
        if self.pool is not None:
            self.pool.reset(key)
        [opening] = await opened.answers()
        self._stop_if_failed([opening])
        if opening.messages is not None:
            return Conversation(self.rules, self.rules.row_of_opening(opening))
        conversation = Conversation(self.rules, self._row_of_prompt(opened.row))
        if opening.failed:
            conversation.break_off(opening)
        return conversation

    def _add(self, conversation: Conversation, turn: FinishedResponse, at: float) -> list[ToolCall]:
        with _breaking_off(conversation):
            return conversation.add_turn(sampled_turn(turn), at)
        return []

    def _call(self, key: Key, conversation: Conversation, calls: list[ToolCall]) -> None:
        if self.pool is not None and self.rules.has_environment:
            self.pool.step(key, conversation.messages[-1]["content"], calls)
        elif self.pool is not None:
            self.pool.submit(key, calls)

    def _observe(self, conversation: Conversation, answers: list[Observation], at: float) -> None:
        shown: Sequence[Observation] = ()
        with _breaking_off(conversation):
            shown = conversation.observe(answers, at)
        self._stop_if_failed(shown)
        if self.on_tool_error == "end" and any(one.failed for one in shown):
            conversation.end(StopReason.FAILED, is_masked=True)

    def _stop_if_failed(self, observations: Sequence[Observation]) -> None:
        failed = [one.text for one in observations if one.failed]
        if failed and self.on_tool_error == "stop":
            what = "the environment" if self.rules.has_environment else "a tool"
            raise RuntimeError(stop_problem(what, failed[0]))

    def _row_of_prompt(self, row: Columns) -> Row:
        prompt = Prompt(row["raw_prompt_ids"], row["prompt_messages"], row["multi_modal_data"])
        return Row(prompt, self.rules.media)

    def _resume(self, arrived: Sequence[tuple[Key, Any]]) -> dict[Key, None]:
        """Lead conversations on with what they waited for; return them in this order."""
        for key, value in arrived:
            self._open[key].resume(value)
        return {key: None for key, _ in arrived}

    def _start(self, key: Key, row: Columns, seed: int | None) -> None:
        if self.pool is not None:
            self.pool.start(key, columns_of(self.rules, key, row, seed))
        opened = self._open[key] = _Open(row, self._now)
        opened.leader = self._lead(key, opened)
        opened.resume()

    def _finish(self, key: Key) -> FinishedResponse:
        opened = self._open.pop(key)
        assert opened.finished is not None, "it has ended"
        if self.pool is not None:
            self.pool.end(key)
        return finished_response(key, opened.finished, opened.drafts)

    def _end(self, conversations: dict[Key, _Open]) -> None:
        if self.pool is not None:
            for key in conversations:
                self.pool.end(key)
        conversations.clear()

    def _submit(self, keys: Sequence[Key]) -> None:
        """Have the next turns of conversations sampled, or what is left of them."""
        ready = [key for key in keys if self._open[key].request is not None]
        begun = {key: {0: turn} for key in ready if (turn := self._open[key].begun) is not None}
        self.sampling.submit([self._request(key, key) for key in ready], self._options, begun)
        for key in ready:
            self._open[key].begun = None

    @property
    def _num_calling(self) -> int:
        return sum(opened.request is None and opened.finished is None for opened in self._open.values())

    def _answers(self) -> list[tuple[Key, list[Observation]]]:
        """Return the answers that have come, equal on all ranks of the engine; parked ones keep theirs."""
        answers = [(key, opened.answer) for key, opened in self._open.items() if opened.answer is not None]
        missing = self._num_calling - len(answers)
        arrived: list[tuple[Any, list[Observation]]] = []
        if self.pool is not None and missing:
            arrived = self.pool.ready(0.0 if answers or self.sampling.num_unfinished else WAIT_S)
            while self.in_lockstep and sum(key in self._open for key, _ in arrived) < missing:
                arrived += self.pool.ready(WAIT_S)
        arrived = self._agree(arrived)
        for key, observations in arrived:
            if key in self._parked:
                self._parked[key].answer = observations
        answers += [each for each in arrived if each[0] in self._open]
        if self.in_lockstep:
            places = {key: place for place, key in enumerate(self._open)}
            answers.sort(key=lambda each: places[each[0]])
        return answers

    def _agree(self, answers: list[Any]) -> list[Any]:
        answers, self._now = self.sampling.engine.agree((answers, time.monotonic() - self._began))
        return answers

    def _request(self, key: Key, uid: Any) -> RolloutRequest:
        opened = self._open[key]
        turn = opened.request
        assert turn is not None, "the conversation waits for a turn"
        media = self.decode_media(turn.media)
        opened.media.append(media)
        offset = seed_offset(key, turn.number)
        return RolloutRequest(uid, turn.token_ids, media, max_tokens=turn.max_tokens, seed_offset=offset)


@contextmanager
def _breaking_off(conversation: Conversation) -> Iterator[None]:
    """Have an error that no rule foresees end one conversation, and not the engine with all others."""
    try:
        yield
    except Exception as error:
        logger.exception("a turn or an observation of a conversation could not be read")
        conversation.break_off(Observation(f"Error: {error!r}.", failed=True))


def key_of(turn: FinishedResponse) -> Key:
    return turn.uid if isinstance(turn.uid, Key) else Key(turn.uid, turn.sample)
