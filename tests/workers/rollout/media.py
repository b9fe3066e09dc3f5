# SPDX-License-Identifier: Apache-2.0
"""Prompts with images and videos made of nothing but arithmetic."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.workers.rollout.reference import change_weights, collect, hub_tensors, reference_log_probs
from verl.data.media.decoded import DecodedMedia, media_in_order, shape_of
from verl.models.families.interface import KINDS, EncodedMedium
from verl.models.families.mrope import continue_positions
from verl.models.families.registry import family_of
from verl.models.families.tiny_sizes import TinyModel
from verl.workers.rollout.interface import EmbeddedMedia, RolloutRequest, SamplingOptions


def picture(seed, height=60, width=90):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def film(seed, frames=6, height=56, width=84):
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    meta = dict(
        total_num_frames=4 * frames, fps=2.5, duration=1.6 * frames, frames_indices=list(range(0, 4 * frames,
        4)), video_backend="pyav", do_sample_frames=False,
    )  # fmt: skip
    return pixels, meta


def media_requests(tokenizer, recipe: Any = TinyModel):
    """Text alone, one image, two images of different sizes, a video, and an image with a video."""
    image, video = recipe.image, recipe.video  # by default those of the Qwen models
    rows = {
        "text": ("What colour?", DecodedMedia()),
        "image": (f"{image}What colour?", DecodedMedia([picture(1)])),
        "images": (f"{image} or {image}?", DecodedMedia([picture(1), picture(2, 120, 60)])),
        "video": (f"How many? {video}", DecodedMedia([], [film(3)])),
        "both": (f"{video} red {image} one", DecodedMedia([picture(4)], [film(5, frames=4)])),
    }
    return [RolloutRequest(uid, tokenizer.encode(text), media) for uid, (text, media) in rows.items()]


@torch.no_grad()
def embedded(model, processor, request):
    """The request with features of the model's vision tower instead of pixels."""
    family = family_of(model.config)
    shape = shape_of(family, processor, request.media)
    media = media_in_order(family, processor, request.prompt_token_ids, request.media, shape)
    facts = {kind: iter(shape.of(kind)) for kind in KINDS}
    found = {kind: [] for kind in KINDS}
    for medium in media:
        (features,) = family.encode(model.get_submodule(family.media_owner), [medium])
        found[medium.kind].append(EncodedMedium(features, next(facts[medium.kind]).facts))
    ids = request.prompt_token_ids
    if family.embeds_prompts:
        ids = family.expand(processor, ids, shape)
    return replace(request, prompt_token_ids=ids, media=EmbeddedMedia(*found.values()))


def media_log_probs(model, processor, request, response_ids, temperature=1.0):
    """The reference's log-probs of a response to a prompt with media."""
    family, raw = family_of(model.config), request.prompt_token_ids
    shape = shape_of(family, processor, request.media)
    prompt_ids = family.expand(processor, raw, shape)
    media = media_in_order(family, processor, raw, request.media, shape)
    family.repair(model)
    inputs = family.own_inputs(media) if media else {}
    ids = torch.tensor([*prompt_ids, *response_ids])[None]
    positions = family.positions(model.config, torch.tensor(prompt_ids), shape)  # (4, L)
    if positions is None:
        positions = torch.arange(len(prompt_ids))
    positions = torch.cat([positions, continue_positions(positions[..., -1], len(response_ids))], -1)
    return reference_log_probs(
        model, prompt_ids, response_ids, temperature, position_ids=positions[..., None, :],
        **inputs, **family.own_arguments(model.config, ids),
    )  # fmt: skip


def media_references(models, processor, requests, temperature=1.0):
    """A function for each model, for `largest_difference_by_version`."""
    by_uid = {request.uid: request for request in requests}
    return [
        lambda response, model=model: media_log_probs(
            model, processor, by_uid[response.uid], response.token_ids, temperature
        )
        for model in models
    ]


def largest_media_difference(model, processor, requests, responses, temperature=1.0):
    by_uid = {request.uid: request for request in requests}
    differences = {
        key: (
            torch.tensor(response.log_probs)
            - media_log_probs(model, processor, by_uid[response.uid], response.token_ids, temperature)
        )
        .abs()
        .max()
        .item()
        for key, response in responses.items()
    }
    return max(differences.values()), differences


def check_media_after_syncs(engine, model, processor):
    """Compare log-probs of all kinds of prompts with the model's, after two syncs of changed weights."""
    requests = media_requests(processor.tokenizer)

    for seed, temperature in ((1, 1.0), (2, 0.7)):
        change_weights(model, seed)
        engine.sync_weights(hub_tensors(model))
        responses = collect(engine, requests, SamplingOptions(n=2, temperature=temperature, max_tokens=12))

        largest, differences = largest_media_difference(model, processor, requests, responses, temperature)
        assert largest < 1e-4, {key: value for key, value in differences.items() if value > 1e-4}
