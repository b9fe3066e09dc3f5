# SPDX-License-Identifier: Apache-2.0
"""Videos of the quickstart: one square moves back and forth, another one does not. Deterministic.

A single frame does not show which of them moves: in the sampled frames, both squares are at an end of paths
of the same length. The model has to compare two frames.
"""

import random
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw
from shapes import COLORS, IMAGE_SIZE, vary, write_rows_with_media

QUESTION = "<video>What colour is the square that moves?"
TURN = 3  # frames from one end of the path to the other
STEP = 10  # pixels per frame; after a whole path a square no longer covers its first position
NUM_SAMPLED = 4  # evenly spaced frames that the model sees: the square is at an end in each
NUM_FRAMES = (NUM_SAMPLED - 1) * TURN + 1
SIZES = (22, 24)  # pixels of a square's side, smallest and largest
LANE = IMAGE_SIZE // 2  # pixels; width of the lane that a square moves in

Corner = tuple[int, int]


def draw_frames(rng: random.Random, color: str) -> list[Image.Image]:
    """Draw a moving square of `color` and a resting one of another color, on dark gray."""
    gray = rng.randint(0, 60)
    other = rng.choice([name for name in COLORS if name != color])
    flip = rng.choice((1, -1))  # paths are horizontal or vertical
    frames = [Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (gray, gray, gray)) for _ in range(NUM_FRAMES)]
    for name, speed, lane in zip((color, other), (1, 0), rng.sample((0, LANE), 2), strict=True):
        fill, size = vary(rng, name), rng.randint(*SIZES)
        for frame, corner in zip(frames, find_corners(rng, size, speed, lane), strict=True):
            left, top = corner[::flip]
            ImageDraw.Draw(frame).rectangle((left, top, left + size - 1, top + size - 1), fill=fill)
    return frames


def find_corners(rng: random.Random, size: int, speed: int, lane: int) -> list[Corner]:
    """Return a square's position in each frame, along its path and across; it starts at an end."""
    start = rng.randint(0, IMAGE_SIZE - TURN * STEP - size)
    across = lane + rng.randint(0, LANE - size)
    phase = rng.choice((0, TURN))
    turns = [(phase + speed * number) % (2 * TURN) for number in range(NUM_FRAMES)]
    return [(start + STEP * min(turn, 2 * TURN - turn), across) for turn in turns]


def save_video(frames: list[Image.Image], path: Path) -> None:
    """Encode frames as MPEG-4 with four frames per second, all of them key frames."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4, options={"qscale": "2"})
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        stream.codec_context.gop_size = 1  # other frames would blur the moving square only
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        container.mux(stream.encode())


def write_video_questions(folder: Path, name: str, count: int, seed: int) -> Path:
    """Write `count` questions to `<name>.jsonl` and their videos to `videos/`; returns the file.

    Always giving the same answer is right 1 time in 4, naming one of the two squares 2 times in 4.
    """
    return write_rows_with_media(
        folder, name, count, seed, question=QUESTION, answers=list(COLORS), media="videos", suffix=".mp4",
        save=lambda rng, color, path: save_video(draw_frames(rng, color), path),
    )  # fmt: skip
