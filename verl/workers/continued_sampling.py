# SPDX-License-Identifier: Apache-2.0
"""Resume interrupted responses after a weight update, or on another engine.

An interrupted response keeps its tokens with their log-probs and the version of the weights that sampled
them. It continues as a request whose prompt ends with these tokens, so that nothing that older weights have
cached is read again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from verl.models.mixture.routes import join_routes
from verl.workers.rollout.interface import (
    INTERRUPTED,
    FinishedResponse,
    RolloutEngine,
    RolloutRequest,
    SamplingOptions,
    join_drafts,
)

SEED_STRIDE = 1_000_003  # between the seeds before and after a token


class SampleId(NamedTuple):
    """One of the responses to a prompt."""

    uid: Any
    sample: int


@dataclass
class OpenRequest:
    """A request with unfinished responses."""

    request: RolloutRequest
    n: int  # responses
    begun: dict[int, FinishedResponse]  # by sample, the unfinished ones: what they had when last interrupted

    @property
    def is_whole(self) -> bool:
        """True if no response has a token yet."""
        return len(self.begun) == self.n and not any(response.token_ids for response in self.begun.values())


class ContinuedSampling:
    """Samples with an engine whose weights may change at any time.

    Example::

        sampling = ContinuedSampling(engine)
        sampling.submit(requests, SamplingOptions(n=8))
        finished = sampling.step(16)
        with sampling.interrupted(version=3):
            engine.sync_weights(weights)
        finished += sampling.step(16)
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.version = 0  # of the engine's weights
        self._options = SamplingOptions()  # of all open requests, but for `n`
        self._open: dict[Any, OpenRequest] = {}  # by uid
        self._ended: list[FinishedResponse] = []  # whole, as an interruption found them

    @property
    def num_unfinished(self) -> int:
        """Number of submitted responses that `step` has not returned yet."""
        return sum(len(opened.begun) for opened in self._open.values())

    def submit(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingOptions,
        begun: Mapping[Any, Mapping[int, FinishedResponse]] | None = None,
    ) -> None:
        """Start `sampling.n` responses to each request, or continue its unfinished ones.

        Args:
            begun: What unfinished responses have, by uid and sample.
        """
        shared = replace(sampling, n=1)
        assert not self._open or shared == self._options, "open requests have other sampling options"
        self._options = shared
        for request in requests:
            its = (begun or {}).get(request.uid) or {
                sample: FinishedResponse(request.uid, sample, [], [], INTERRUPTED)
                for sample in range(sampling.n)
            }
            self._open[request.uid] = OpenRequest(request, sampling.n, dict(its))
        self._resume([request.uid for request in requests])

    def step(self, at_most: int = 1) -> list[FinishedResponse]:
        """Advance all requests as `RolloutEngine.step` does, and return the responses that are whole now."""
        finished = self._take_ended() or [self._joined(response) for response in self.engine.step(at_most)]
        for response in finished:
            begun = self._open[response.uid].begun
            del begun[response.sample]
            if not begun:
                del self._open[response.uid]
        return finished

    def abort(self, uids: Iterable[Any]) -> None:
        """Drop requests; finished and unknown ones are skipped."""
        for uid in uids:
            opened = self._open.pop(uid, None)
            if opened is not None:
                self.engine.abort([uid, *(SampleId(uid, sample) for sample in opened.begun)])
                self._ended = [response for response in self._ended if response.uid != uid]

    def interrupt(self) -> list[FinishedResponse]:
        """Drop all requests, and return what each response that `step` has not returned has, for `submit`."""
        begun = self._take_ended() + [self._joined(response) for response in self.engine.interrupt()]
        self._open.clear()
        return begun

    @contextmanager
    def interrupted(self, version: int) -> Iterator[None]:
        """Stop for a change of weights inside the block, and continue with those of `version`."""
        for response in map(self._joined, self.engine.interrupt()):
            self._open[response.uid].begun[response.sample] = response
        self._ended.clear()  # they are among those begun
        yield
        self.version = version
        self._resume(list(self._open))

    def _resume(self, uids: Sequence[Any]) -> None:
        whole: dict[int, list[RolloutRequest]] = {}  # by number of responses
        rest: list[RolloutRequest] = []
        for opened in map(self._open.__getitem__, uids):
            if opened.is_whole:
                whole.setdefault(opened.n, []).append(opened.request)
            else:
                begun = opened.begun.values()
                self._ended += [each for each in begun if each.finish_reason != INTERRUPTED]
                unfinished = [each for each in begun if each.finish_reason == INTERRUPTED]
                rest += [self._continuation(opened.request, each) for each in unfinished]
        for n, requests in whole.items():
            self.engine.submit(requests, replace(self._options, n=n))
        if rest:
            self.engine.submit(rest, self._options)

    def _take_ended(self) -> list[FinishedResponse]:
        ended, self._ended = self._ended, []
        return ended

    def _continuation(self, request: RolloutRequest, begun: FinishedResponse) -> RolloutRequest:
        num_tokens = len(begun.token_ids)
        return replace(
            request,
            uid=SampleId(begun.uid, begun.sample),
            prompt_token_ids=[*request.prompt_token_ids, *begun.token_ids],
            max_tokens=request.response_limit(self._options) - num_tokens,
            seed_offset=request.seed_offset + begun.sample + SEED_STRIDE * num_tokens,
        )

    def _joined(self, response: FinishedResponse) -> FinishedResponse:
        """Put what was sampled since the last interruption after what there was."""
        uid, sample = response.uid, response.sample
        if isinstance(uid, SampleId):
            uid, sample = uid
        before = self._open[uid].begun[sample]
        return replace(
            response,
            uid=uid,
            sample=sample,
            token_ids=before.token_ids + response.token_ids,
            log_probs=before.log_probs + response.log_probs,
            versions=before.versions + [self.version] * len(response.token_ids),
            routes=join_routes(before.routes, response.routes),
            drafts=join_drafts(before.drafts, response.drafts),
        )
