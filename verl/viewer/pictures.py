# SPDX-License-Identifier: Apache-2.0
"""Pictures for people: files of the pictures and videos that a policy makes, and drawings of audio."""

import io

import av
import numpy as np
from PIL import Image, ImageDraw

FPS = 16  # frames per second of a video
# With the largest zlib level a picture of 1024 x 1024 pixels takes 1 s and a tenth less room.
PNG_LEVEL = 1
H264 = {"crf": "12"}  # hardly to be told from the frames
WAVEFORM = (384, 128)  # width and height in pixels
PAPER, INK, AXIS = (255, 255, 255), (31, 119, 180), (190, 190, 190)


def to_rows(pixels: np.ndarray) -> np.ndarray:
    """Return pixels (..., 3, H, W) as (..., H, W, 3)."""
    return np.ascontiguousarray(np.moveaxis(pixels, -3, -1))


def as_png(pixels: np.ndarray) -> bytes:
    """Encode a picture (3, H, W) uint8 without loss."""
    content = io.BytesIO()
    Image.fromarray(to_rows(pixels)).save(content, "PNG", compress_level=PNG_LEVEL)
    return content.getvalue()


def as_mp4(frames: np.ndarray) -> bytes:
    """Encode a video (F, 3, H, W) uint8 as H.264; odd sides are extended by one pixel."""
    odd = [(0, side % 2) for side in frames.shape[-2:]]  # colors have half the resolution
    rows = to_rows(np.pad(frames, [(0, 0), (0, 0), *odd], mode="edge"))
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options=H264)
        stream.height, stream.width = rows.shape[1:3]
        stream.pix_fmt = "yuv420p"  # the only one that every browser plays
        for row in rows:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(row, format="rgb24")))
        container.mux(stream.encode())
    return content.getvalue()


def draw_waveform(samples: np.ndarray) -> Image.Image:
    """Draw the range of the samples (N,) in each column; from -1 to 1, or to the largest beyond."""
    width, height = WAVEFORM
    picture = Image.new("RGB", WAVEFORM, PAPER)
    pen = ImageDraw.Draw(picture)
    pen.line((0, height / 2, width, height / 2), fill=AXIS)
    top = max(1.0, float(np.abs(samples).max(initial=0.0)))
    bounds = np.linspace(0, len(samples), width + 1).astype(int)
    for column in range(width):
        part = samples[bounds[column] : max(bounds[column + 1], bounds[column] + 1)]
        if len(part):
            low, high = (height / 2 * (1 - value / top) for value in (part.min(), part.max()))
            pen.line((column, high, column, low), fill=INK)
    return picture
