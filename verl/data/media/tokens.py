# SPDX-License-Identifier: Apache-2.0
"""Media tokens of prompts: how many a model has for each image and video, and the times of video frames."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class MediaShape:
    """Sizes that determine the media tokens and positions of a prompt."""

    image_grid_thw: Tensor  # (images, 3) int64, patches in time, height, width
    video_grid_thw: Tensor  # (videos, 3) int64
    second_per_grid_ts: Tensor  # (videos,) float32, seconds of a temporal patch
    timestamps: list[list[float]]  # seconds, for each video and temporal patch


def expand_prompt(prompt_ids: list[int], processor: Any, shape: MediaShape) -> list[int]:
    """Replace the single token of each image and video by as many as the model has embeddings for."""
    media = {
        processor.image_token_id: ("image", image_tokens(processor, shape)),
        processor.video_token_id: ("video", video_tokens(processor, shape)),
    }
    for token, (kind, tokens) in media.items():
        found = prompt_ids.count(token)
        if found != len(tokens):
            raise ValueError(f"the rendered prompt has {found} {kind} tokens for {len(tokens)} {kind}s")

    remaining = {token: iter(tokens) for token, (_, tokens) in media.items()}
    expanded: list[int] = []
    for token in prompt_ids:
        expanded += next(remaining[token]) if token in remaining else [token]
    if not has_timestamps(processor) or hasattr(type(processor), "replace_video_token"):
        return expanded
    # Around a video with timestamps, processors of transformers before 5.10 replace the template's own vision
    # start and end together with the video token.
    return _without_outer_edges(expanded, processor)


def image_tokens(processor: Any, shape: MediaShape) -> list[list[int]]:
    merged = processor.image_processor.merge_size**2
    grids = shape.image_grid_thw.tolist()
    return [[processor.image_token_id] * (math.prod(grid) // merged) for grid in grids]


def video_tokens(processor: Any, shape: MediaShape) -> list[list[int]]:
    """Return the tokens of each video; Qwen3-VL puts the time before each temporal patch."""
    merged = processor.video_processor.merge_size**2
    videos = []
    for (time, height, width), stamps in zip(shape.video_grid_thw.tolist(), shape.timestamps, strict=True):
        frame = [processor.video_token_id] * (height * width // merged)
        if not has_timestamps(processor):
            videos.append(frame * time)
            continue
        tokens: list[int] = []
        for stamp in stamps:
            tokens += processor.tokenizer.encode(f"<{stamp:.1f} seconds>", add_special_tokens=False)
            tokens += [processor.vision_start_token_id, *frame, processor.vision_end_token_id]
        videos.append(tokens)
    return videos


def has_timestamps(processor: Any) -> bool:
    """Return whether the model reads the times of video frames as text, as Qwen3-VL does."""
    return hasattr(processor, "_calculate_timestamps")


def _without_outer_edges(tokens: list[int], processor: Any) -> list[int]:
    """Drop each vision start that is not followed by a media token, and its vision end."""
    start, end = processor.vision_start_token_id, processor.vision_end_token_id
    media = (processor.image_token_id, processor.video_token_id)
    return [
        token
        for position, token in enumerate(tokens)
        if not (token == start and tokens[position + 1] not in media)
        and not (token == end and tokens[position - 1] == end)
    ]


def sampled_fps(meta: dict[str, Any]) -> float:
    """Return the sampled frames per second of video."""
    return len(meta["frames_indices"]) / meta["total_num_frames"] * meta["fps"]


def timestamps(meta: dict[str, Any], temporal_patch_size: int) -> list[float]:
    """Return the time of each temporal patch in seconds: the middle between its first and last frame."""
    indices = meta["frames_indices"]
    times = [index / meta["fps"] for index in indices + indices[-1:] * (-len(indices) % temporal_patch_size)]
    last = temporal_patch_size - 1
    return [(times[i] + times[i + last]) / 2 for i in range(0, len(times), temporal_patch_size)]
