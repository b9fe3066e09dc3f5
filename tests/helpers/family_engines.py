# SPDX-License-Identifier: Apache-2.0
"""A rollout engine's log-probs of a family's tiny model against those of plain transformers."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers.families import Part, Tiny, clips_of, images_of, render, sounds_of
from tests.workers.rollout.media import embedded, largest_media_difference, media_log_probs
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    hub_tensors,
    load_model,
    reference_log_probs,
)
from verl.data.media.loader import DecodedMedia
from verl.models.families.registry import load_config
from verl.planning.layer_caches import layer_caches
from verl.workers.rollout.interface import RolloutRequest, SamplingOptions


def requests_of(tiny: Tiny, rows: Sequence[Sequence[Part]]) -> list[RolloutRequest]:
    """Return prompts as the engines get them: media tokens are not expanded."""
    requests = []
    for number, row in enumerate(rows):
        prompt_ids = tiny.processor.tokenizer.encode(render(tiny, row), add_special_tokens=False)
        videos = [(clip.frames, dict(clip.meta)) for clip in clips_of(row)]
        audios = [(sound.samples, 16000) for sound in sounds_of(row)]
        clips = [clip.sound for clip in clips_of(row)]
        heard = [(sound, 16000) for sound in clips if sound is not None]
        media = DecodedMedia(images_of(row), videos, audios, heard)
        requests.append(RolloutRequest(f"row {number}", prompt_ids, media))
    return requests


def engine_error(
    tiny: Tiny,
    engine: Any,
    rows: Sequence[Sequence[Part]],
    *,
    as_features: bool = False,
    seeds: Sequence[int] = (1, 2),
) -> float:
    """Return the largest difference of log-probs, after each of several weight syncs."""
    model, found = load_model(tiny.folder), []
    requests = requests_of(tiny, rows)
    for seed in seeds:
        change_weights(model, seed)
        engine.sync_weights(hub_tensors(model))
        given = [embedded(model, tiny.processor, each) for each in requests] if as_features else requests
        temperature = 1.0 if seed % 2 else 0.7
        sampling = SamplingOptions(n=2, temperature=temperature, max_tokens=12)
        responses = collect(engine, given, sampling)
        found.append(largest_media_difference(model, tiny.processor, requests, responses, temperature)[0])
    return max(found)


def assert_cache_is_planned(engine: Any, folder: Path) -> None:
    """Assert that vLLM keeps of each kind of layer what the planner counts."""
    (specs,) = engine.llm.collective_rpc("get_kv_cache_spec")
    found: Counter[tuple[float, bool]] = Counter()
    for spec in specs.values():
        if hasattr(spec, "shapes"):  # a state
            found[math.inf, True] += sum(map(math.prod, spec.shapes))
        else:
            window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
            size = spec.unpadded_page_size_bytes // spec.dtype.itemsize
            found[window or math.inf, False] += size // spec.block_size
    caches = layer_caches(load_config(folder).get_text_config())
    assert found == {
        (each.window, not each.numbers): each.numbers or each.state + each.float32_state for each in caches
    }


def rounding_ratio(
    folder: Path,
    engine: Any,
    requests: Sequence[RolloutRequest],
    processor: Any = None,  # None for a text model
    *,
    as_features: bool = False,
    seed: int = 1,
) -> float:
    """Return the engine's error in bfloat16, relative to that of the model's own forward in bfloat16.

    Both are root mean squares of differences from the same weights in float32.
    """
    model = load_model(folder)
    change_weights(model, seed)
    engine.sync_weights(hub_tensors(model))
    rough = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    rough.load_state_dict(model.state_dict())  # rounds
    model.load_state_dict(rough.state_dict())
    given = [embedded(model, processor, each) for each in requests] if as_features else requests
    by_uid = {request.uid: request for request in requests}
    errors, noise = [], []
    for response in collect(engine, given, SamplingOptions(n=2, max_tokens=12)).values():
        exact, rounded = (
            _log_probs(each, processor, by_uid[response.uid], response.token_ids) for each in (model, rough)
        )
        errors.append(torch.tensor(response.log_probs) - exact)
        noise.append(rounded - exact)
    error, floor = (torch.cat(parts).square().mean().sqrt().item() for parts in (errors, noise))
    assert floor < 0.05, "a floor this high would hide errors"
    return error / floor


def _log_probs(model: Any, processor: Any, request: RolloutRequest, token_ids: list[int]) -> torch.Tensor:
    if processor is None:
        return reference_log_probs(model, request.prompt_token_ids, token_ids)
    return media_log_probs(model, processor, request, token_ids)
