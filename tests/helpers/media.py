# SPDX-License-Identifier: Apache-2.0
"""Small real images and videos for tests, deterministic."""

import io
from pathlib import Path

import av
import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    """(height, width, 3) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save_image(path: Path, width: int, height: int, seed: int = 0, mode: str = "RGB") -> str:
    Image.fromarray(noise(width, height, seed)).convert(mode).save(path)
    return str(path)


def image_bytes(width: int, height: int, seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(width, height, seed)).save(buffer, format="PNG")
    return buffer.getvalue()


def save_video(path: Path, width: int, height: int, num_frames: int, fps: int = 8, seed: int = 0) -> str:
    """Save a video with a different gray level in every frame, using PyAV's codecs."""
    codec = "ffv1" if path.suffix == ".mkv" else "mpeg4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p"
        for number in range(num_frames):
            pixels = np.full((height, width, 3), (seed * 31 + number * 7) % 256, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return str(path)
