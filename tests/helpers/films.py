# SPDX-License-Identifier: Apache-2.0
"""Videos of any codec, container and length, in which adjacent frames differ."""

import itertools
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

MILLISECOND = Fraction(1, 1000)
FASTSTART = {"movflags": "faststart"}  # index first, so that a truncated file keeps it
UNEVEN = (20, 40, 41, 42, 80, 500)  # milliseconds from frame to frame


def save_film(
    path: Path,
    codec: str,
    num_frames: int,
    keyframe_distance: int,
    *,
    options: dict[str, str] | None = None,
    uneven: bool = False,
    fps: int = 24,
    size: tuple[int, int] = (56, 56),
) -> str:
    """Save a pattern that moves by one pixel per frame; `uneven` makes the frame times irregular."""
    width, height = size
    pattern = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    pattern = pattern.repeat(8, 0).repeat(8, 1)
    steps = itertools.cycle(UNEVEN)
    time = 0
    with av.open(str(path), "w", options=FASTSTART if path.suffix == ".mp4" else {}) as container:
        stream = container.add_stream(codec, rate=fps, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = keyframe_distance
        if uneven:
            stream.codec_context.time_base = MILLISECOND
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.roll(pattern, number, 1), format="rgb24")
            if uneven:
                frame.pts, frame.time_base = time, MILLISECOND
                time += next(steps)
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return str(path)


def every_frame(path: str) -> list[np.ndarray]:
    """Decode all frames (height, width, 3) in order."""
    with av.open(path) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
