# SPDX-License-Identifier: Apache-2.0
"""Prompts with images and videos made of nothing but arithmetic."""

from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from tests.workers.rollout.reference import reference_log_probs
from verl.data.media.loader import DecodedMedia
from verl.data.media.tokens import expand_prompt, sampled_fps, timestamps
from verl.models.position_ids import MropeConstants, continue_positions, position_ids_for
from verl.workers.rollout.base import EmbeddedMedia, RolloutRequest
from verl.workers.rollout.hf_rollout import GRIDS, media_features


def picture(seed, height=60, width=90):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def film(seed, frames=6, height=56, width=84):
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    meta = dict(
        total_num_frames=4 * frames, fps=2.5, duration=1.6 * frames, frames_indices=list(range(0, 4 * frames,
        4)), video_backend="pyav", do_sample_frames=False,
    )  # fmt: skip
    return pixels, meta


def media_requests(tokenizer):
    """Text alone, one image, two images of different sizes, a video, and an image with a video."""
    image, video = (
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|vision_start|><|video_pad|><|vision_end|>",
    )
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
    features, _ = media_features(processor, request.media)
    found = {"image": [], "video": []}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if name not in features:
            continue
        grids = features[f"{kind}_grid_thw"]
        encoded = model.model.get_image_features(features[name], grids, return_dict=True)
        levels = [encoded.pooler_output, *(getattr(encoded, "deepstack_features", None) or [])]
        sizes = (grids.prod(-1) // processor.image_processor.merge_size**2).tolist()
        split = [level if isinstance(level, tuple) else level.split(sizes) for level in levels]
        for index, parts in enumerate(zip(*split, strict=True)):
            found[kind].append({"features": torch.cat(parts, -1), "grid_thw": grids[index : index + 1]})
    patches = processor.video_processor.temporal_patch_size
    for item, (_, meta) in zip(found["video"], request.media.videos, strict=True):
        item["second_per_grid_ts"] = torch.tensor([patches / sampled_fps(meta)])
        item["timestamps"] = torch.tensor(timestamps(meta, patches), dtype=torch.float64)
    return replace(request, media=EmbeddedMedia(found["image"], found["video"]))


def media_log_probs(model, processor, request, response_ids, temperature=1.0):
    """The reference's log-probs of a response to a prompt with media."""
    features, shape = media_features(processor, request.media)
    prompt_ids = expand_prompt(request.prompt_token_ids, processor, shape)
    grids = {name: features[name] for name in GRIDS if name in features}
    positions = position_ids_for(model.config.model_type)(
        torch.tensor(prompt_ids), MropeConstants.from_config(model.config), **grids
    )  # (4, L)
    positions = torch.cat([positions, continue_positions(positions[:, -1], len(response_ids))], 1)
    return reference_log_probs(
        model, prompt_ids, response_ids, temperature, position_ids=positions[:, None], **features
    )


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
