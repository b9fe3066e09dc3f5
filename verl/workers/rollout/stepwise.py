# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping of unfinished requests, and whole batches on top of single steps, for every engine."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from verl.workers.rollout.interface import FinishedResponse, RolloutRequest, SamplingOptions


class StepwiseEngine(ABC):
    """The part of `RolloutEngine` that takes requests, makes steps and returns responses."""

    def __init__(self) -> None:
        self._unfinished: dict[Any, int] = {}  # number of unfinished responses, by the request's uid
        self._temperature = 1.0  # of the unfinished requests

    @property
    def num_unfinished(self) -> int:
        return sum(self._unfinished.values())

    def submit(self, requests: Sequence[RolloutRequest], sampling: SamplingOptions) -> None:
        """Start sampling responses; if a request is refused, none of them is started."""
        temperature = sampling.logit_temperature
        assert not self._unfinished or temperature == self._temperature, (
            f"unfinished requests have temperature {self._temperature}, and a step divides all logits by one:"
            f" finish or abort them before requests at {temperature}"
        )
        added = dict.fromkeys((request.uid for request in requests), sampling.n)
        assert len(added) == len(requests) and not added.keys() & self._unfinished.keys(), (
            f"requests need uids that no unfinished request has, got {[request.uid for request in requests]}"
        )
        self._temperature = temperature
        self._accept(requests, sampling)
        self._unfinished |= added

    def step(self, at_most: int = 1) -> list[FinishedResponse]:
        """Make steps until one finishes a response; random streams are swapped once for all of them."""
        finished: list[FinishedResponse] = []
        with self._sampling():
            while self._unfinished and at_most > 0 and not finished:
                finished = self._advance()
                at_most -= 1
        for response in finished:
            self._unfinished[response.uid] -= 1
            if self._unfinished[response.uid] == 0:
                del self._unfinished[response.uid]
        return finished

    def abort(self, uids: Iterable[Any]) -> None:
        dropped = {uid for uid in uids if uid in self._unfinished}
        if not dropped:
            return
        self._drop(dropped)
        for uid in dropped:
            del self._unfinished[uid]

    def interrupt(self) -> list[FinishedResponse]:
        """Drop all requests, and return what each unfinished response has, perhaps no token yet."""
        begun = self._begun()
        self._abort_all()
        return begun

    def generate(
        self, requests: list[RolloutRequest], sampling: SamplingOptions
    ) -> Iterator[list[FinishedResponse]]:
        """Sample responses and yield them as they finish; closing the iterator early aborts the others."""
        assert not self._unfinished, (
            f"a batch needs an idle engine, this one has {self.num_unfinished} responses"
        )
        try:
            self.submit(requests, sampling)
            while self._unfinished:
                yield self.step(at_most=sys.maxsize)
        finally:
            self.abort([request.uid for request in requests])

    def agree(self, value: Any) -> Any:
        """Return the value of the engine's first rank: here it has one."""
        return value

    def _abort_all(self) -> None:
        self.abort(list(self._unfinished))

    def _check_idle(self) -> None:
        assert not self._unfinished, (
            f"weights cannot change under {self.num_unfinished} unfinished responses: finish or abort them"
        )

    @abstractmethod
    def _sampling(self) -> AbstractContextManager[Any]:
        """Return the context that `_advance` runs in, which restores training's random numbers."""

    @abstractmethod
    def _accept(self, requests: Sequence[RolloutRequest], sampling: SamplingOptions) -> None:
        """Wake the engine and take all requests, or raise an error and take none."""

    @abstractmethod
    def _advance(self) -> list[FinishedResponse]:
        """Make one step and return the responses that it finished."""

    @abstractmethod
    def _begun(self) -> list[FinishedResponse]:
        """Return a copy of what each unfinished response has, with the reason `INTERRUPTED`."""

    @abstractmethod
    def _drop(self, uids: set[Any]) -> None:
        """Forget the unfinished requests of these uids."""
