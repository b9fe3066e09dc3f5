# SPDX-License-Identifier: Apache-2.0
"""Compressibility: pictures that make a small JPEG (DDPO, https://arxiv.org/abs/2305.13301, section 5.1).

overall = -weight * kilobytes          weight 1 by default; a negative one asks for the opposite

kilobytes   size of the picture as a JPEG, in 1,000 bytes; `quality` is 95 by default. The mean over the
            frames of a video
"""

import io
from typing import Any

import torch
from PIL import Image

REWARD_NAME = "jpeg_size"
REWARD_TYPE = "sequential"


def jpeg_bytes(picture: torch.Tensor, quality: int) -> int:
    """Return the size of a picture (3, H, W) from 0 to 1 as a JPEG."""
    pixels = (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous()
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, format="JPEG", quality=quality)
    return file.tell()


def compute_score(reward_input: dict[str, Any], weight: float = 1.0, quality: int = 95) -> dict[str, float]:
    frames = reward_input["videos"] if "videos" in reward_input else reward_input["images"][None]
    kilobytes = sum(jpeg_bytes(frame, quality) for frame in frames) / len(frames) / 1000
    return {"overall": -weight * kilobytes, "kilobytes": kilobytes}
