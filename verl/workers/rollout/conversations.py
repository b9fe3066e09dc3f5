# SPDX-License-Identifier: Apache-2.0
"""Conversations next to a rollout engine: each continues at its own pace while the tools of others work.

Turns and answers arrive in any order. With tensor parallelism the first rank of an engine runs the tools and
tells the others what came and when, so that all make the same calls of the engine.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from verl.agents.conversation import FAILED, Conversation, FinishedConversation
from verl.agents.environments.prompts import row_of
from verl.agents.interface import Observation
from verl.agents.row import Prompt, Row
from verl.agents.rules import ConversationRules
from verl.agents.tools.pool import ToolPool
from verl.data.media.loader import MediaData
from verl.workers.rollout.base import FinishedResponse, RolloutEngine, RolloutRequest, SamplingOptions

WAIT_S = 0.05  # for an answer, while the engine has nothing to do
STEPS = 4  # of the engine, after which it is seen whether an answer has come
MAX_SEED = 1 << 31  # environments hand it to generators of random numbers

Columns = Mapping[str, Any]  # of a row of the data set, with its prompt


class Key(NamedTuple):
    """A conversation: one of the samples of a prompt."""

    uid: Any
    sample: int


class ConversationDriver:
    """Leads the conversations of a batch of prompts.

    Example::

        driver = ConversationDriver(engine, pool, rules, decode_media)
        for finished in driver.run(rows, SamplingOptions(n=8)):
            ...
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pool: ToolPool | None,  # None on a rank that follows another one's
        rules: ConversationRules,
        decode_media: Callable[[MediaData], Any],  # to what the engine reads
    ) -> None:
        self.engine, self.pool, self.rules, self.decode_media = engine, pool, rules, decode_media
        self.on_tool_error = rules.options.on_tool_error
        self._open: dict[Key, Conversation] = {}
        self._calling: set[Key] = set()  # their calls are not answered
        self._rows: dict[Key, Columns] = {}  # of those whose environment has not begun
        self._started = self._now = 0.0

    def run(self, rows: Sequence[Columns], sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Lead `sampling.n` conversations for each row and yield them as they end, in any order."""
        self._open, self._calling, self._rows = {}, set(), {}
        self._started, self._now = time.monotonic(), 0.0
        try:
            for row in rows:
                for sample in range(sampling.n):
                    self._start(Key(row["uid"], sample), row, sampling.seed)
            if not self.rules.has_environment:
                # the samples of a prompt have the same first request
                self.engine.submit([self._request(Key(row["uid"], 0), row["uid"]) for row in rows], sampling)
            yield from self._lead(sampling.override({"n": 1}))
        finally:
            self.engine.abort([*(row["uid"] for row in rows), *self._open])
            if self.pool is not None:
                for key in (*self._open, *self._rows):
                    self.pool.end(key)

    def close(self) -> None:
        """End the processes of the tools."""
        if self.pool is not None:
            self.pool.close()

    def _lead(self, sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        while self._open or self._rows:
            touched: dict[Key, None] = {}  # in order; an answer may follow its turn at once
            for turn in self.engine.step(STEPS if self._calling else sys.maxsize):
                touched[self._take(turn)] = None
            for key, observations, _ in self._answers():
                self._observe(key, observations)
                touched[key] = None
            waiting = [key for key in touched if key not in self._calling and not self._open[key].is_done]
            if waiting:
                self.engine.submit([self._request(key, key) for key in waiting], sampling)
            ended = [self._finish(key) for key in touched if self._open[key].is_done]
            if ended:
                yield ended

    def _take(self, turn: FinishedResponse) -> Key:
        key = turn.uid if isinstance(turn.uid, Key) else Key(turn.uid, turn.sample)
        conversation = self._open[key]
        calls = conversation.add_turn(turn.token_ids, turn.log_probs, turn.finish_reason, self._now)
        if conversation.is_waiting:
            self._calling.add(key)
            if self.pool is None:
                return key
            if self.rules.has_environment:
                self.pool.step(key, conversation.messages[-1]["content"], calls)
            else:
                self.pool.submit(key, calls)
        return key

    def _observe(self, key: Key, observations: list[Observation]) -> None:
        self._calling.discard(key)
        if key in self._rows:
            self._stop_if_failed(observations)
            self._open[key] = self._begun(self._rows.pop(key), observations[0])
            return
        conversation = self._open[key]
        answers = conversation.observe(observations, self._now)
        self._stop_if_failed(answers)
        if self.on_tool_error == "end" and any(one.failed for one in answers):
            conversation.end(FAILED, is_masked=True)

    def _stop_if_failed(self, observations: Sequence[Observation]) -> None:
        failed = [one.text for one in observations if one.failed]
        if failed and self.on_tool_error == "stop":
            what = "the environment" if self.rules.has_environment else "a tool"
            raise RuntimeError(stop_problem(what, failed[0]))

    def _answers(self) -> list[tuple[Key, list[Observation], float]]:
        # equal on all ranks of the engine, as is the clock
        answers: list[Any] = []
        if self.pool is not None and self._calling:
            answers = self.pool.ready(0.0 if self.engine.num_unfinished else WAIT_S)
        answers, self._now = self.engine.agree((answers, time.monotonic() - self._started))
        return answers

    def _request(self, key: Key, uid: Any) -> RolloutRequest:
        turn = self._open[key].request()
        media = self.decode_media(turn.media)
        offset = seed_offset(key, turn.number)
        return RolloutRequest(uid, turn.token_ids, media, max_tokens=turn.max_tokens, seed_offset=offset)

    def _start(self, key: Key, row: Columns, seed: int | None) -> None:
        if self.pool is not None:
            self.pool.start(key, columns_of(self.rules, key, row, seed))
        if not self.rules.has_environment:
            self._open[key] = Conversation(self.rules, self._row_of_prompt(row))
            return
        self._rows[key] = row
        self._calling.add(key)
        if self.pool is not None:
            self.pool.reset(key)

    def _begun(self, row: Columns, opening: Observation) -> Conversation:
        """Return the conversation of an environment that has answered `reset`."""
        if opening.messages is not None:
            return Conversation(self.rules, row_of(self.rules, opening))
        conversation = Conversation(self.rules, self._row_of_prompt(row))
        if opening.failed:
            conversation.fail(opening)
        return conversation

    def _row_of_prompt(self, row: Columns) -> Row:
        prompt = Prompt(row["raw_prompt_ids"], row["prompt_messages"], row["multi_modal_data"])
        return Row(prompt, self.rules.media)

    def _finish(self, key: Key) -> FinishedResponse:
        done = self._open.pop(key).finish()
        if self.pool is not None:
            self.pool.end(key)
        return finished_response(key, done)


def finished_response(key: Key, done: FinishedConversation) -> FinishedResponse:
    return FinishedResponse(
        key.uid, key.sample, done.token_ids, done.log_probs, done.finish_reason, done.trajectory
    )


def stop_problem(what: str, reason: str) -> str:
    """Say why a run ends whose tool, environment or agent failed."""
    return f"{what} failed, and `worker.rollout.multi_turn.on_tool_error=stop` ends the run then: {reason}"


def columns_of(rules: ConversationRules, key: Key, row: Columns, seed: int | None) -> dict[str, Any]:
    """Return a row as tools, environments and agents get it, with its prompt's media on disk."""
    columns, media = {**row, "sample": key.sample}, row["multi_modal_data"]
    if rules.media is not None and media:
        on_disk = rules.media.loader.on_disk
        columns |= {name: list(map(on_disk, media.get(name) or ())) for name in ("images", "videos")}
    if columns.get("seed") is None:
        columns["seed"] = _int_of(("seed", seed, key.uid)) % MAX_SEED
    return columns


def seed_offset(key: Key, turn: int) -> int:
    """Return what a turn adds to the seed of the run, whatever other conversations do and when."""
    return _int_of((key.uid, key.sample, turn))


def _int_of(value: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest())
