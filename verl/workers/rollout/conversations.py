# SPDX-License-Identifier: Apache-2.0
"""Conversations beside a rollout engine: each goes on at its own pace while the tools of others work.

Turns and answers arrive in any order. With tensor parallelism the first rank of a group runs the tools and
tells the others what came, so that all make the same calls of the engine.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from verl.agents.conversation import Conversation
from verl.agents.interface import Observation
from verl.agents.pool import ToolPool
from verl.workers.rollout.base import FinishedResponse, RolloutEngine, RolloutRequest, SamplingOptions

WAIT_S = 0.05  # for an answer, while the engine has nothing to do

Row = Mapping[str, Any]  # of a prompt, with its columns


class Key(NamedTuple):
    """A conversation: one of the samples of a prompt."""

    uid: Any
    sample: int


class Answer(NamedTuple):
    """The observations of a turn's calls."""

    key: Key
    observations: list[Observation]
    seconds: float  # since the calls were made


class ConversationDriver:
    """Leads the conversations of a batch of prompts.

    Example::

        driver = ConversationDriver(engine, pool, make_conversation, decode_media, on_tool_error="show")
        for finished in driver.run(rows, SamplingOptions(n=8)):
            ...
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pool: ToolPool | None,  # None on a rank that follows another one's
        make_conversation: Callable[[Row], Conversation],
        decode_media: Callable[[Any], Any],  # from references to what the engine reads
        on_tool_error: str,
    ) -> None:
        self.engine, self.pool, self.on_tool_error = engine, pool, on_tool_error
        self.make_conversation, self.decode_media = make_conversation, decode_media
        self.idle_s = 0.0  # in which the engine waited for tools, of the last `run`
        self._open: dict[Key, Conversation] = {}
        self._calling: set[Key] = set()  # their calls are not answered

    def run(self, rows: Sequence[Row], sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Lead `sampling.n` conversations for each row and yield them as they end, in any order."""
        self.idle_s, self._calling = 0.0, set()
        self._open = {}
        try:
            for row in rows:
                for sample in range(sampling.n):
                    self._start(Key(row["uid"], sample), row)
            # the samples of a prompt share its first request
            first = [self._request(Key(row["uid"], 0), row["uid"]) for row in rows]
            self.engine.submit(first, sampling)
            yield from self._lead(sampling)
        finally:
            self.engine.abort([*(row["uid"] for row in rows), *self._open])
            for key in list(self._open):
                self._close(key)

    def _lead(self, sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        alone = sampling.override({"n": 1})  # a later turn belongs to one conversation
        while self._open:
            ended = []
            for turn in self.engine.step() if self.engine.num_unfinished else []:
                key = turn.uid if isinstance(turn.uid, Key) else Key(turn.uid, turn.sample)
                ended += self._take(key, turn)
            for key, observations, seconds in self._answers():
                ended += self._observe(key, observations, seconds, alone)
            if ended:
                yield ended

    def _take(self, key: Key, turn: FinishedResponse) -> list[FinishedResponse]:
        conversation = self._open[key]
        calls = conversation.add_turn(turn.token_ids, turn.log_probs, turn.finish_reason)
        if conversation.is_done:
            return [self._finish(key)]
        self._calling.add(key)
        if self.pool is not None:
            self.pool.submit(key, calls)
        return []

    def _observe(
        self, key: Key, observations: list[Observation], seconds: float, sampling: SamplingOptions
    ) -> list[FinishedResponse]:
        self._calling.discard(key)
        conversation = self._open[key]
        failed = [one.text for one in observations if one.failed]
        if failed and self.on_tool_error == "stop":
            raise RuntimeError(
                f"a tool failed, and `worker.rollout.multi_turn.on_tool_error` is stop: {failed[0]}"
            )
        conversation.observe(observations, seconds)
        if failed and self.on_tool_error == "end":
            conversation.end(masked=True)
        if conversation.is_done:
            return [self._finish(key)]
        self.engine.submit([self._request(key, key)], sampling)
        return []

    def _answers(self) -> list[Answer]:
        # the same on all ranks of the engine, and in the same order
        if not self._calling:
            return []
        answers: list[Answer] = []
        if self.pool is not None:
            start, is_idle = time.monotonic(), not self.engine.num_unfinished
            answers = [Answer(*one) for one in self.pool.ready(WAIT_S if is_idle else 0.0)]
            self.idle_s += time.monotonic() - start if is_idle else 0.0
        return self.engine.agree(answers)

    def _request(self, key: Key, uid: Any) -> RolloutRequest:
        request = self._open[key].request()
        return RolloutRequest(
            uid,
            request.token_ids,
            self.decode_media(request.media),
            max_tokens=request.max_tokens,
            seed_offset=request.turn,
        )

    def _start(self, key: Key, row: Row) -> None:
        self._open[key] = self.make_conversation(row)
        if self.pool is not None:
            self.pool.start(key, row)

    def _close(self, key: Key) -> Conversation:
        if self.pool is not None:
            self.pool.end(key)
        return self._open.pop(key)

    def _finish(self, key: Key) -> FinishedResponse:
        token_ids, log_probs, trajectory = self._close(key).finish()
        return FinishedResponse(key.uid, key.sample, token_ids, log_probs, trajectory.stop_reason, trajectory)
