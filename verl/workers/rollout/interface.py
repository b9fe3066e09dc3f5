# SPDX-License-Identifier: Apache-2.0
"""The interface of rollout engines: prompts in, finished responses out, weights synced from training.

`engines.py` lists the engines by name.
"""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.agents.interface import Trajectory
from verl.models.families.interface import EncodedMedium
from verl.models.lora_weights import AdapterConfig

INTERRUPTED = "interrupted"  # finish reason of a response that is not finished
GREEDY_BELOW = 1e-5  # temperatures below it mean argmax, in vLLM as well
# Options of a model's config that name the tokens of media, and those before and after them.
MEDIA_TOKENS = re.compile(r"(image|video|vision|audio|boi|eoi|boa|eoa)_(.+_)?token_(id|index)$")


@dataclass(frozen=True)
class SamplingOptions:
    """Options for sampling responses."""

    n: int = 1  # responses to each prompt
    temperature: float = 1.0  # divides the logits; 0 takes the most likely token
    top_p: float = 1.0  # smallest share of probability to sample from; 1 is all
    top_k: int = -1  # most likely tokens to sample from; -1 is all
    max_tokens: int = 16  # longest response
    seed: int | None = None  # for every prompt its own random numbers; None: the engine's, which is faster
    ignore_eos: bool = False  # continue after the end-of-sequence token
    is_apart: bool = False  # leaves the engine's random numbers to others: those of validation to training
    first_sample: int = 0  # number of the first of the `n`: conversations of a later part draw other numbers
    extra: Mapping[str, Any] = field(default_factory=dict)  # other fields of vLLM's `SamplingParams`

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken instead of sampled."""
        return self.temperature < GREEDY_BELOW

    @property
    def logit_temperature(self) -> float:
        """Divisor of the logits for log-probs; greedy sampling counts as temperature 1."""
        return 1.0 if self.is_greedy else self.temperature

    def override(self, values: Mapping[str, Any]) -> "SamplingOptions":
        """Replace some options, as `val_override_config` does; unknown names go to `extra`."""
        own = {entry.name for entry in fields(self)} - {"extra"}
        known = {name: value for name, value in values.items() if name in own}
        extra = {name: value for name, value in values.items() if name not in own}
        return replace(self, **known, extra={**self.extra, **extra})


@dataclass(frozen=True)
class EmbeddedMedia:
    """Features of one prompt's media, computed by the policy's vision tower."""

    images: list[EncodedMedium]
    videos: list[EncodedMedium]
    audios: list[EncodedMedium]


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt."""

    uid: Any  # returned with each response
    prompt_token_ids: list[int]  # one pad token for each medium, expanded only if the engine embeds prompts
    media: Any = None  # `DecodedMedia`, `PendingMedia`, or `EmbeddedMedia` if the engine takes embeddings
    max_tokens: int | None = None  # longest response; None: that of the sampling options
    seed_offset: int = 0  # added to `SamplingOptions.seed`: another turn draws other random numbers

    def response_limit(self, sampling: SamplingOptions) -> int:
        """Return the longest response that this request may get."""
        limit = sampling.max_tokens if self.max_tokens is None else self.max_tokens
        assert limit >= 1, f"a response has at least one token, got a limit of {limit} for {self.uid}"
        return limit


class Drafts(NamedTuple):
    """Numbers of tokens in speculative decoding."""

    proposed: int = 0
    accepted: int = 0

    def plus(self, proposed: int, accepted: int) -> "Drafts":
        return Drafts(self.proposed + proposed, self.accepted + accepted)


def join_drafts(first: Drafts | None, second: Drafts | None) -> Drafts | None:
    """Add the numbers of two parts of a response; None of an engine without speculative decoding."""
    return first or second if first is None or second is None else first.plus(*second)


@dataclass(frozen=True)
class FinishedResponse:
    """One sampled response."""

    uid: Any  # the request's
    sample: int  # index among the prompt's `n` responses
    token_ids: list[int]  # up to and including the token that ended it
    # of those tokens under softmax(logits / temperature) over the whole vocabulary: before top-p, top-k and
    # banned tokens; greedy sampling counts as temperature 1
    log_probs: list[float]
    finish_reason: str  # "stop", "length" if `max_tokens` cut it off, or `INTERRUPTED`
    trajectory: Trajectory | None = None  # of a conversation; its tokens and log-probs are those of all turns
    # of the weights that sampled each token, where they may change within a response
    versions: list[int] = field(default_factory=list)
    # (tokens, L, k): experts of the first tokens of prompt and response, see `models.mixture.routes`
    routes: Tensor | None = None
    drafts: Drafts | None = None  # None without speculative decoding


class RolloutEngine(ABC):
    """Samples responses with a copy of the policy; one in each worker process.

    It keeps account of unfinished requests; an engine accepts some, makes single steps, and drops some.
    """

    dtype: torch.dtype  # of its weights
    takes_embeddings: bool  # reads `EmbeddedMedia`
    embeds_prompts: bool  # reads nothing else, with expanded prompts
    takes_adapter: bool  # synced by `sync_adapter` instead of `sync_weights`
    keeps_weights: bool  # during `sleep`; then a later sync leaves out weights that are never trained

    def __init__(self) -> None:
        self._unfinished: dict[Any, int] = {}  # number of unfinished responses, by the request's uid
        self._temperature = 1.0  # of the unfinished requests

    @property
    def num_unfinished(self) -> int:
        """Number of submitted responses that `step` has not returned yet."""
        return sum(self._unfinished.values())

    def submit(self, requests: Sequence[RolloutRequest], sampling: SamplingOptions) -> None:
        """Start sampling `sampling.n` responses to each request, while earlier requests continue.

        Uids are unique among unfinished requests, and all unfinished requests have the same temperature.
        Every rank of a tensor-parallel group submits, steps and aborts in the same order. If a request is
        refused, none of them is started; `step` refuses those whose media it reads.
        """
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
        """Advance all requests by about one token and return the responses that it finished.

        Args:
            at_most: Steps to make; it returns after the first one that finishes a response. Random streams
                are swapped once for all of them.
        """
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
        """Drop requests without a response; finished and unknown ones are skipped."""
        dropped = {uid for uid in uids if uid in self._unfinished}
        if not dropped:
            return
        self._drop(dropped)
        for uid in dropped:
            del self._unfinished[uid]

    def interrupt(self) -> list[FinishedResponse]:
        """Drop all requests, and return what each unreturned response has: nothing, or all, by its reason."""
        begun = self._begun()
        self._abort_all()
        return begun

    def agree(self, value: Any) -> Any:
        """Return the value of the engine's first rank; a collective call with tensor parallelism."""
        return value  # of one rank

    def generate(
        self, requests: list[RolloutRequest], sampling: SamplingOptions
    ) -> Iterator[list[FinishedResponse]]:
        """Sample `sampling.n` responses to each request and yield them as they finish, in any order.

        The engine has no other requests. Every rank of a tensor-parallel group passes the same requests in
        the same order and consumes all responses; closing the iterator early aborts the others.
        """
        unfinished = self.num_unfinished
        assert not unfinished, f"a batch needs an idle engine, this one has {unfinished} responses"
        try:
            self.submit(requests, sampling)
            while self._unfinished:
                yield self.step(at_most=sys.maxsize)
        finally:
            self.abort([request.uid for request in requests])

    @abstractmethod
    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by full tensors under their hub names, one at a time.

        Every rank consumes all tensors: producing one gathers it from all shards. No request is unfinished.
        Engines in `TAKES_STACKS` get joint weights of experts as slices, see `HubNames.convert`.
        """

    @abstractmethod
    def sync_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter by full tensors under their names in the model; the base is loaded already."""

    @abstractmethod
    def wake(self) -> None:
        """Allocate the device memory freed by `sleep`; least is needed after `sync_weights`."""

    @abstractmethod
    def sleep(self) -> None:
        """Free device memory for training until `wake`, and abort unfinished requests.

        Without `keeps_weights` a sync has to follow.
        """

    @abstractmethod
    def rng_state(self) -> dict[str, Any]:
        """State of the engine's random stream, for a checkpoint."""

    @abstractmethod
    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restore a state from `rng_state`."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; the engine is not used afterwards."""

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
        """Return what each unfinished response has, with the reason `INTERRUPTED` unless it just ended."""

    @abstractmethod
    def _drop(self, uids: set[Any]) -> None:
        """Forget the unfinished requests of these uids."""


@dataclass(frozen=True)
class EngineAdapter:
    """The adapter that an engine serves."""

    config: AdapterConfig
    modules: tuple[str, ...]  # names of the adapted modules in memory


@dataclass(frozen=True)
class EngineSetup:
    """Engine options outside of `worker.rollout`."""

    model_path: str  # folder or hub id
    max_length: int  # longest prompt plus longest response, in tokens, unless `max_model_len` is set
    device: str  # of `BACKENDS`
    dp_rank: int = 0  # index of this engine; the ranks of one tensor-parallel group share it
    tokenizer_path: str | None = None  # tokenizer and processor, if not in `model_path`
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)  # replaces options of the model's config
    takes_embeddings: bool = False  # a frozen tower: pass media as `EmbeddedMedia`, if the engine takes them
    adapter: EngineAdapter | None = None  # synced by `sync_adapter`; None: whole weights are synced
    records_routes: bool = False  # responses of a mixture of experts come with `routes`
    media: Any = None  # `ProcessedMedia`, whose outputs of the image processor the engine uses


def media_token_ids(model_config: Any) -> list[int]:
    """Tokens that represent media in a prompt and must not be sampled; empty for a text model."""
    options = model_config.to_dict().items()
    return sorted({token for name, token in options if MEDIA_TOKENS.match(name) and token is not None})
