# SPDX-License-Identifier: Apache-2.0
"""Pixels to features: one call of the vision tower for everything in a micro-batch.

Under FSDP every rank must run the tower equally often, whether its rows hold images, videos, both or
neither. So images and videos go through together, and rows without media are joined by a row with a small
blank image (`dummy_row`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class EncodedMedia:
    """Features of images or of videos, named as the models read them."""

    pooler_output: tuple[Tensor, ...]  # for each image: (tokens, hidden size)
    deepstack_features: list[tuple[Tensor, ...]] | None = (
        None  # the same for each level, where a model has levels
    )


class DummyRow(NamedTuple):
    """A row of tokens with one small blank image."""

    input_ids: Tensor  # (L,) int64
    pixel_values: Tensor
    image_grid_thw: Tensor  # (1, 3)


def encode_media(
    owner: Any,
    media: dict[str, Tensor],
    image_order: list[int] | None = None,
    video_order: list[int] | None = None,
) -> dict[str, EncodedMedia]:
    """Features of all images and videos by one call of the vision tower.

    Args:
        owner: The module with `get_image_features`.
        media: `pixel_values` with `image_grid_thw`, `pixel_values_videos` with `video_grid_thw`, or both.
        image_order: For each image in the tokens, which of the given ones it is; the given order by default.
        video_order: The same for videos.

    Returns:
        Features under "image" and "video", as far as they were given.
    """
    pixels = [media[key] for key in ("pixel_values", "pixel_values_videos") if key in media]
    grids = [media[key] for key in ("image_grid_thw", "video_grid_thw") if key in media]
    encoded = owner.get_image_features(torch.cat(pixels), torch.cat(grids), return_dict=True)
    levels = getattr(encoded, "deepstack_features", None)  # Qwen3-VL only
    images = len(media["image_grid_thw"]) if "image_grid_thw" in media else 0
    features = {}
    for kind, start, stop, order in (
        ("image", 0, images, image_order),
        ("video", images, len(encoded.pooler_output), video_order),
    ):
        if stop > start:
            chosen = range(start, stop) if order is None else [start + index for index in order]
            features[kind] = EncodedMedia(
                tuple(encoded.pooler_output[index] for index in chosen),
                None if levels is None else [tuple(level[index] for index in chosen) for level in levels],
            )
    return features


def dummy_row(config: Any, rows: int = 1, columns: int = 1) -> DummyRow:
    """A row whose only content is a blank image of `rows` x `columns` tokens.

    Args:
        config: A vision-language model's transformers config.
        rows: Height of the image in tokens.
        columns: Width of the image in tokens.
    """
    vision = config.vision_config
    merge = vision.spatial_merge_size
    patches = rows * columns * merge * merge
    channels = getattr(vision, "in_channels", 3)
    tokens = (
        [config.vision_start_token_id]
        + [config.image_token_id] * (rows * columns)
        + [config.vision_end_token_id]
    )
    return DummyRow(
        torch.tensor(tokens),
        torch.zeros(patches, channels * vision.temporal_patch_size * vision.patch_size**2),
        torch.tensor([[1, rows * merge, columns * merge]]),
    )
