# SPDX-License-Identifier: Apache-2.0
"""Compare the rollout engine with the trainer, for models without a family file.

The engine has its own processing of images and its own positions, which no one has compared for such a model:
a difference would only show as a policy that learns from log-probabilities of other prompts.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from verl.data.media.decoded import DecodedMedia, media_in_order
from verl.data.media.loader import MediaLoader
from verl.distributed.device import to_device
from verl.models.deferred_logits import DeferredLogits
from verl.models.families.interface import KINDS, WHAT_TO_WRITE, EncodedMedium, Kind, MediaShape, Medium
from verl.models.monkey_patch import evaluating
from verl.models.registry import TOLERANCE
from verl.workers.rollout.interface import (
    EmbeddedMedia,
    FinishedResponse,
    RolloutEngine,
    RolloutRequest,
    SamplingOptions,
)

SAMPLED_TOKENS = 8
# Height and width of the images of each prompt.
PROMPTS: tuple[tuple[tuple[int, int], ...], ...] = (((64, 64),), ((80, 120),), ((64, 64), (150, 60)), ())
TEXT = "What is in the picture?"

# Mean differences of an engine with FP8 weights and activations: tiny models have 0.07 to 0.12, with and
# without images, ten times those of bfloat16.
QUANTIZED_TEXT, BEYOND_TEXT = 0.5, 0.15  # in text; after images more than in text

REMEDY = f"{WHAT_TO_WRITE}, or sample with `worker.rollout.name=hf`"


@contextlib.contextmanager
def refusing_engine(name: str, is_tried: bool) -> Iterator[None]:
    """Refuse an engine that cannot be built, if it is only tried with a model that no file describes."""
    try:
        yield
    except Exception as error:  # whatever an engine raises
        if not is_tried:
            raise
        raise NotImplementedError(
            f"the rollout engine `{name}` cannot run this model ({error}): {REMEDY}"
        ) from error


class SampledRow(NamedTuple):
    """A prompt, and what the engine sampled."""

    prompt_ids: list[int]  # expanded
    response: FinishedResponse
    media: list[Medium]


def check_requests(
    media: MediaLoader,
    tokenizer: Any,
    max_length: int,  # of prompt and response
    limit_images: int,  # in a prompt; 0 is none
) -> list[RolloutRequest]:
    """Return prompts with one image, with two, and with none, as far as the engine takes them."""
    rng = np.random.default_rng(0)
    placeholder = next(iter(media.family.placeholders(media.processor)))
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    requests = []
    for number, sizes in enumerate(PROMPTS):
        images = [Image.fromarray(rng.integers(256, size=(*size, 3), dtype=np.uint8)) for size in sizes]
        ids = [token for _ in images for token in (placeholder, *text)] or text
        decoded = DecodedMedia(images)
        length = len(media.expand(ids, media.shape_of(decoded))) + SAMPLED_TOKENS
        if length <= max_length and not 0 < limit_images < len(images):
            requests.append(RolloutRequest(number, ids, decoded if images else None))
    return requests


def sample(
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    media: MediaLoader,
    encode: Callable[[Sequence[Medium]], list[Tensor]] | None = None,  # for an engine that embeds prompts
) -> list[SampledRow]:
    """Sample a few tokens of each request, without touching the engine's stream of random numbers."""
    sampling = SamplingOptions(max_tokens=SAMPLED_TOKENS, ignore_eos=True)
    state, given = engine.rng_state(), list(requests)
    if engine.embeds_prompts:
        assert encode is not None, "the trainer encodes media for this engine"
        given = [embedded(request, media, encode) for request in requests]
    try:
        responses = {one.uid: one for some in engine.generate(given, sampling) for one in some}
    except Exception as error:  # whatever an engine raises
        raise NotImplementedError(
            f"the rollout engine cannot sample for prompts with images ({error}): {REMEDY}"
        ) from error
    engine.set_rng_state(state)
    rows = []
    for request in requests:
        shape, inputs = _inputs(request, media)
        ids = media.expand(request.prompt_token_ids, shape)
        rows.append(SampledRow(ids, responses[request.uid], inputs))
    return rows


def embedded(
    request: RolloutRequest, media: MediaLoader, encode: Callable[[Sequence[Medium]], list[Tensor]]
) -> RolloutRequest:
    """Return a request with features and an expanded prompt."""
    if request.media is None:
        return request
    shape, inputs = _inputs(request, media)
    found: dict[Kind, list[EncodedMedium]] = {kind: [] for kind in KINDS}
    for medium, features in zip(inputs, encode(inputs), strict=True):
        found[medium.kind].append(EncodedMedium(features, medium.facts))
    ids = media.expand(request.prompt_token_ids, shape)
    return replace(request, prompt_token_ids=ids, media=EmbeddedMedia(*found.values()))


def _inputs(request: RolloutRequest, media: MediaLoader) -> tuple[MediaShape, list[Medium]]:
    if request.media is None:
        return MediaShape(), []
    shape, ids = media.shape_of(request.media), request.prompt_token_ids
    return shape, media_in_order(media.family, media.processor, ids, request.media, shape)


class Differences(NamedTuple):
    """Mean absolute differences of the engine's log-probabilities, the largest of all ranks."""

    with_images: float
    of_text: float  # of prompts without images


def differences(model: nn.Module, rows: Sequence[SampledRow], device: torch.device) -> Differences:
    """Run the sampled rows through the trainer's packed pass; collective over all ranks."""
    ids = [torch.tensor([*row.prompt_ids, *row.response.token_ids]) for row in rows]
    lengths = torch.tensor([len(each) for each in ids])
    ends, tokens = lengths.cumsum(0), torch.cat(ids)
    sampled = [len(row.response.token_ids) for row in rows]
    targets = torch.cat(
        [torch.arange(end - count, end) for end, count in zip(ends.tolist(), sampled, strict=True)]
    )
    arguments = to_device(
        dict(
            input_ids=tokens[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
            cu_seqlens=nn.functional.pad(ends, (1, 0)).to(torch.int32),
            media=[medium for row in rows for medium in row.media],
        ),
        device,
    )
    before, wanted = to_device((targets - 1, tokens[targets]), device)

    def read(logits: DeferredLogits) -> Tensor:
        return logits.log_probs(wanted, before, temperature=1.0).log_probs

    with evaluating(model):
        own = model(**arguments, read=read)
    theirs = torch.tensor([value for row in rows for value in row.response.log_probs])
    has_media = torch.tensor([bool(row.media) for row in rows for _ in row.response.log_probs])
    apart = (own.float().cpu() - theirs).abs()
    means = [part.mean() if len(part) else torch.zeros(()) for part in (apart[has_media], apart[~has_media])]
    found = torch.stack(means).nan_to_num(torch.inf).to(device)
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return Differences(*found.tolist())


def check_engine(
    name: str,  # of the engine
    model_type: str,
    dtypes: Sequence[torch.dtype],  # that engine and trainer compute in
    measured: Differences,
    *,
    is_quantized: bool = False,
) -> None:
    """Raise NotImplementedError if engine and trainer differ by more than rounding.

    What quantized weights cost shows in text as well, so images are held against text.
    """
    rounding = max(TOLERANCE[dtype] for dtype in dtypes)
    allowed = Differences(rounding, rounding)
    if is_quantized:
        allowed = Differences(measured.of_text + BEYOND_TEXT, QUANTIZED_TEXT)
    if not (measured.with_images <= allowed.with_images and measured.of_text <= allowed.of_text):
        remedy = f"{REMEDY}, or set `worker.rollout.quantization=null`" if is_quantized else REMEDY
        raise NotImplementedError(
            f"the rollout engine `{name}` computes other log-probabilities of {model_type} than the trainer:"
            f" they differ by {measured.with_images:.2g} after images and by {measured.of_text:.2g} in text,"
            f" at most {allowed.with_images:.2g} and {allowed.of_text:.2g} are allowed: {remedy}"
        )
