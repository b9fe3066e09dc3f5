# SPDX-License-Identifier: Apache-2.0
"""Pictures and frames that a policy made, for reward functions. Imports no torch."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image


def frames_of(reward_input: Mapping[str, Any], num_frames: int = 8) -> list[Image.Image]:
    """Return the tensors (3, H, W) from 0 to 1 of `pictures_of` as images."""
    pictures = (picture.permute(1, 2, 0) for picture in pictures_of(reward_input, num_frames))
    return [Image.fromarray((picture * 255).round().byte().numpy()) for picture in pictures]


def pictures_of(reward_input: Mapping[str, Any], num_frames: int = 8) -> list[Any]:
    """Return the picture of a response (3, H, W), or at most that many frames of its video, evenly spaced."""
    if "videos" not in reward_input:
        return [reward_input["images"]]
    frames = reward_input["videos"]
    chosen = np.linspace(0, len(frames) - 1, min(num_frames, len(frames))).round().astype(int)
    return [frames[number] for number in chosen.tolist()]


def as_png(image: Image.Image) -> bytes:
    image.save(file := io.BytesIO(), format="PNG")
    return file.getvalue()
