# SPDX-License-Identifier: Apache-2.0
"""Agents next to a rollout engine: each leads a conversation in its process and calls the policy.

Calls come by HTTP, in any order. With tensor parallelism the first rank of an engine serves them, and tells
the others what to sample and when, so that all make the same calls of the engine.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from verl.data.media.references import MediaData
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.conversations.agent_leader import AgentLeader, CallId, Step, Turn
from verl.workers.conversations.keys import Begun, Columns, Key, placed, samples_of, seed_offset
from verl.workers.rollout.interface import FinishedResponse, RolloutRequest, SamplingOptions

STEPS = 4  # of the engine, after which calls are taken


class AgentDriver:
    """Has an agent lead each conversation: a batch of them, or ones that join at any time.

    Its methods are those of `ConversationDriver`. The agents of parked conversations work on until they call
    the policy.

    Example::

        driver = AgentDriver(ContinuedSampling(engine), AgentLeader(pool, endpoint, rules, decode), decode)
        for finished in driver.run(rows, SamplingOptions(n=8)):
            ...
    """

    def __init__(
        self,
        sampling: ContinuedSampling,
        leader: AgentLeader | None,  # None on a rank that follows another one's
        decode_media: Callable[[MediaData], Any],  # to what the engine reads
    ) -> None:
        self.sampling, self._leader, self.decode_media = sampling, leader, decode_media
        self._open: set[Key] = set()
        self._parked: set[Key] = set()
        self._turns: dict[CallId, Turn] = {}  # that are not sampled yet
        self._begun: dict[CallId, FinishedResponse] = {}  # what those of parked conversations have
        self._media: dict[Key, list[Any]] = {}  # of turns: what is held is not processed again
        self._options = SamplingOptions()  # of a turn

    def run(self, rows: Sequence[Columns], sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        assert not self._open, "conversations that join at any time are parked before"
        try:
            self.submit(rows, sampling)
            while self._open:
                yield [placed(response, sampling) for response in self.step(sys.maxsize)]
        finally:
            self._end(self._open)

    def submit(self, rows: Sequence[Columns], sampling: SamplingOptions, begun: Begun | None = None) -> None:
        self._options = replace(sampling, n=1)
        continued: set[Key] = set()
        for row in rows:
            for key in samples_of(row, sampling, begun):
                self._open.add(key)
                if key in self._parked:
                    continued.add(key)
                elif self._leader is not None:
                    self._leader.start(key, row, sampling.seed)
        self._parked -= continued
        if self._leader is not None:
            self._leader.resume(continued)
        turns = [turn for uid, turn in self._turns.items() if uid.key in continued]
        before = {turn.uid: {0: self._begun.pop(turn.uid)} for turn in turns}
        self.sampling.submit([self._request(turn) for turn in turns], self._options, before)

    def step(self, at_most: int) -> list[FinishedResponse]:
        ended: list[FinishedResponse] = []
        while self._open and at_most > 0 and not ended:
            num_steps = min(at_most, STEPS)
            at_most -= num_steps
            for turn in self.sampling.step(num_steps):
                del self._turns[turn.uid]
                if self._leader is not None:
                    self._leader.take(turn)
            ended = self._follow()
        return ended

    def interrupt(self) -> list[FinishedResponse]:
        self._begun |= {response.uid: response for response in self.sampling.interrupt()}
        if self._leader is not None:
            self._leader.park()
        self._parked |= self._open
        self._open = set()
        return []

    def forget(self) -> None:
        self._end(self._parked)

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()

    def _follow(self) -> list[FinishedResponse]:
        """Do what came since the last steps of the engine, and return the conversations that ended."""
        engine, leader = self.sampling.engine, self._leader
        step: Step = engine.agree(None if leader is None else leader.next(self.sampling.num_unfinished > 0))
        self.sampling.abort(step.aborted)
        for uid in step.aborted:
            self._turns.pop(uid, None)
        ended = {Key(response.uid, response.sample) for response in step.ended}
        self._open -= ended
        for key in ended:
            self._media.pop(key, None)
        if step.problem is not None:
            raise RuntimeError(step.problem)
        self._turns |= {turn.uid: turn for turn in step.turns}
        self.sampling.submit([self._request(turn) for turn in step.turns], self._options)
        return step.ended

    def _end(self, conversations: set[Key]) -> None:
        uids = [uid for uid in self._turns if uid.key in conversations]
        self.sampling.abort(uids)
        for uid in uids:
            del self._turns[uid]
            self._begun.pop(uid, None)
        for key in conversations:
            self._media.pop(key, None)
        if self._leader is not None:
            self._leader.stop(conversations)
        conversations.clear()

    def _request(self, turn: Turn) -> RolloutRequest:
        decoded = None if self._leader is None else self._leader.decoded.pop(turn.uid, None)
        media = self.decode_media(turn.media) if decoded is None else decoded
        self._media.setdefault(turn.uid.key, []).append(media)
        offset = seed_offset(*turn.uid)
        return RolloutRequest(turn.uid, turn.token_ids, media, max_tokens=turn.max_tokens, seed_offset=offset)
