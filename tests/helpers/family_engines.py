# SPDX-License-Identifier: Apache-2.0
"""A rollout engine's log-probs of a family's tiny model against those of plain transformers."""

from collections.abc import Sequence
from typing import Any

from tests.helpers.families import Part, Tiny, clips_of, images_of, render
from tests.workers.rollout.media import embedded, largest_media_difference
from tests.workers.rollout.reference import change_weights, collect, hub_tensors, load_model
from verl.data.media.loader import DecodedMedia
from verl.workers.rollout.base import RolloutRequest, SamplingOptions


def requests_of(tiny: Tiny, rows: Sequence[Sequence[Part]]) -> list[RolloutRequest]:
    """Return prompts as the engines get them: media tokens are not expanded."""
    requests = []
    for number, row in enumerate(rows):
        prompt_ids = tiny.processor.tokenizer.encode(render(tiny, row), add_special_tokens=False)
        videos = [(clip.frames, dict(clip.meta)) for clip in clips_of(row)]
        requests.append(RolloutRequest(f"row {number}", prompt_ids, DecodedMedia(images_of(row), videos)))
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
