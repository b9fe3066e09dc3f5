# SPDX-License-Identifier: Apache-2.0
"""Sizes of images and videos on their way into a model: in pixels, then in patches.

The second step is the arithmetic of the model's own processor with its own constants, so that a prompt can be
measured from file headers.
"""

import math
import sys
from inspect import signature
from typing import Any

from PIL import Image


def resized_size(width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Width and height of an image brought between `min_pixels` and `max_pixels`, keeping its aspect."""
    for pixels, is_outside in (
        (max_pixels, width * height > max_pixels),
        (min_pixels, width * height < min_pixels),
    ):
        if is_outside:
            factor = math.sqrt(pixels / (width * height))
            width, height = max(1, int(width * factor)), max(1, int(height * factor))
    return width, height


def process_image(image: Image.Image, min_pixels: int, max_pixels: int) -> Image.Image:
    """Bring an image between `min_pixels` and `max_pixels`, as RGB."""
    size = resized_size(image.width, image.height, min_pixels, max_pixels)
    image.load()
    resized = image if size == image.size else image.resize(size)
    return resized if resized.mode == "RGB" else resized.convert("RGB")


def image_grid(image_processor: Any, height: int, width: int) -> list[int]:
    """Patches of an image in time, height and width after the processor's own resizing."""
    resize = vars(sys.modules[type(image_processor).__module__])["smart_resize"]
    patch, limits = image_processor.patch_size, image_processor.size
    height, width = resize(
        height, width, factor=patch * image_processor.merge_size,
        min_pixels=limits["shortest_edge"], max_pixels=limits["longest_edge"],
    )  # fmt: skip
    return [1, height // patch, width // patch]


def video_grid(video_processor: Any, num_frames: int, height: int, width: int) -> list[int]:
    """Patches of a video in time, height and width after the processor's own resizing."""
    resize = vars(sys.modules[type(video_processor).__module__])["smart_resize"]
    patch, temporal = video_processor.patch_size, video_processor.temporal_patch_size
    factor = patch * video_processor.merge_size
    smallest, largest = video_processor.size["shortest_edge"], video_processor.size["longest_edge"]
    counts_frames = (
        "num_frames" in signature(resize).parameters
    )  # Qwen3-VL: the limits hold for the whole video
    if getattr(video_processor, "cap_pixels_per_frame", None):
        budget = video_processor.max_video_tokens * factor * factor
        if counts_frames:
            largest = max(min(budget, largest // num_frames), int(smallest * 1.05)) * num_frames
        else:
            largest = max(min(largest, int(budget * 0.9) * temporal // num_frames), int(smallest * 1.05))
    frames = {"num_frames": num_frames, "temporal_factor": temporal} if counts_frames else {}
    height, width = resize(
        height=height, width=width, factor=factor, min_pixels=smallest, max_pixels=largest, **frames
    )
    return [-(-num_frames // temporal), height // patch, width // patch]


def smallest_budget(video_processor: Any) -> int:
    """The smallest limit of tokens for each frame that the processor's own resizing keeps.

    It enlarges what has fewer pixels than its lower limit. A frame that fits a budget has more than a quarter
    of it, as both sides are rounded down to merged patches; one that is enlarged anyway has less than
    2 limit + 2 merged patches, as both sides are rounded up.
    """
    factor = video_processor.patch_size * video_processor.merge_size
    return -(-4 * video_processor.size["shortest_edge"] // factor**2)
