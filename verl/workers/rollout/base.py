# SPDX-License-Identifier: Apache-2.0
"""What every rollout engine is: prompts in, finished responses out, weights kept equal to the trained ones.

`engines.py` has the engines by name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from verl.models.lora_weights import AdapterConfig

GREEDY_BELOW = 1e-5  # temperatures below it mean argmax, in vLLM as well
MEDIA_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class SamplingOptions:
    """How to sample responses.

    Attributes:
        n: Responses to each prompt.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Smallest share of probability to sample from; 1 is all.
        top_k: Most likely tokens to sample from; -1 is all.
        max_tokens: Longest response, in tokens.
        seed: Of every prompt's own random numbers; None uses the engine's stream, which is faster.
        ignore_eos: Whether to go on after the end-of-sequence token.
        extra: Other fields of vLLM's `SamplingParams`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    seed: int | None = None
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of sampled."""
        return self.temperature < GREEDY_BELOW

    def override(self, values: Mapping[str, Any]) -> "SamplingOptions":
        """The options with some replaced, as `val_override_config` does; unknown names go to `extra`."""
        own = {entry.name for entry in fields(self)} - {"extra"}
        known = {name: value for name, value in values.items() if name in own}
        extra = {name: value for name, value in values.items() if name not in own}
        return replace(self, **known, extra={**self.extra, **extra})


@dataclass(frozen=True)
class EmbeddedMedia:
    """What a vision tower made of one prompt's media, in place of pixels.

    Attributes:
        images: For each image `features` (tokens, hidden size x (1 + levels)) and `grid_thw` (1, 3).
        videos: For each video these, `second_per_grid_ts` (1,) and `timestamps` (temporal patches,).
    """

    images: list[dict[str, Tensor]]
    videos: list[dict[str, Tensor]]


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt.

    Attributes:
        uid: Comes back with each response.
        prompt_token_ids: One pad token for each image or video, not expanded.
        media: Decoded media with `images` (list of PIL images) and `videos` (list of frames and metadata),
            `EmbeddedMedia` for an engine that takes them, or None.
    """

    uid: Any
    prompt_token_ids: list[int]
    media: Any = None


@dataclass(frozen=True)
class FinishedResponse:
    """One sampled response.

    Attributes:
        uid: Of the request.
        sample: Which of the prompt's `n` responses.
        token_ids: Up to and including the token that ended it.
        log_probs: Of those tokens under softmax(logits / temperature) over the whole vocabulary: before
            top-p, top-k and banned tokens. With greedy sampling the temperature counts as 1.
        finish_reason: "stop", or "length" when `max_tokens` cut it off.
    """

    uid: Any
    sample: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


class RolloutEngine(Protocol):
    """Samples responses with a copy of the policy. One object in each worker process."""

    dtype: torch.dtype  # of its weights
    takes_embeddings: bool  # whether it reads `EmbeddedMedia`
    takes_adapter: bool  # whether `sync_adapter` is called, and `sync_weights` is not

    def generate(
        self, requests: list[RolloutRequest], sampling: SamplingOptions
    ) -> Iterator[list[FinishedResponse]]:
        """Sample `sampling.n` responses to each request and yield them as they finish, in no set order.

        Every rank of a tensor-parallel group passes the same requests in the same order and consumes them
        all.
        """
        ...

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by full tensors under their hub names; consumes them all, one at a time.

        Waits for nothing by itself; every rank calls it, since producing a tensor gathers it from all shards.
        """
        ...

    def sync_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter by whole tensors under their names in the model; the base is there already."""
        ...

    def wake(self) -> None:
        """Take back the device memory given away by `sleep`; after `sync_weights` it needs least."""
        ...

    def sleep(self) -> None:
        """Give device memory to training until `wake`."""
        ...

    def rng_state(self) -> dict[str, Any]:
        """State of the engine's random stream, for a checkpoint."""
        ...

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Continue the random stream from a state of `rng_state`."""
        ...

    def close(self) -> None:
        """Release what the engine holds; it is not used again."""
        ...


@dataclass(frozen=True)
class EngineAdapter:
    """The adapter that an engine serves.

    Attributes:
        config: How the model is adapted.
        modules: Names of the adapted modules in memory.
    """

    config: AdapterConfig
    modules: tuple[str, ...]


@dataclass(frozen=True)
class EngineSetup:
    """What an engine needs to know beside `worker.rollout`.

    Attributes:
        model_path: Folder or hub id of the model.
        max_length: Longest prompt plus longest response, in tokens; `worker.rollout.max_model_len` goes
            before it.
        device: "cuda" or "cpu".
        dp_rank: Which of the independent engines this is; the ranks of one tensor-parallel group share it.
        tokenizer_path: Where tokenizer and processor are, if not with the model.
        trust_remote_code: Whether to run code that comes with the model.
        override_config: Options of the model's config to replace.
        takes_embeddings: Media will come as `EmbeddedMedia`, if the engine takes them.
        adapter: What will come by `sync_adapter`, if the engine takes it; None: whole weights will come.
    """

    model_path: str
    max_length: int
    device: str
    dp_rank: int = 0
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    takes_embeddings: bool = False
    adapter: EngineAdapter | None = None


def media_token_ids(model_config: Any) -> list[int]:
    """Tokens that stand for media in a prompt and must not be sampled; empty for a text model."""
    options = model_config.to_dict()
    return sorted({options[name] for name in MEDIA_TOKENS if options.get(name) is not None})
