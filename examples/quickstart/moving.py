# SPDX-License-Identifier: Apache-2.0
"""The quickstart's videos: two squares, of which one goes back and forth and one stands. The same every time.

A single frame does not tell which of them moves: in the frames that the model takes, both lie at an end of a
way of the same length. Only a comparison of two frames does.
"""

import random
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw
from shapes import COLOURS, IMAGE_SIZE, save_rows, vary

QUESTION = "<video>What colour is the square that moves?"
TURN = 3  # frames from one end of the way to the other
STEP = 10  # pixels from frame to frame: from end to end a square leaves the place it had
NUM_SAMPLED = 4  # frames that the model takes, evenly from the first to the last: every one at an end
NUM_FRAMES = (NUM_SAMPLED - 1) * TURN + 1
SIZES = (22, 24)  # pixels of a square's side, smallest and largest
LANE = IMAGE_SIZE // 2  # pixels across a square's way

Corner = tuple[int, int]


def draw_frames(rng: random.Random, colour: str) -> list[Image.Image]:
    """A square of `colour` that moves beside one of another colour that stands, on a dark grey."""
    grey = rng.randint(0, 60)
    other = rng.choice([name for name in COLOURS if name != colour])
    flip = rng.choice((1, -1))  # ways go from left to right, or from top to bottom
    frames = [Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (grey, grey, grey)) for _ in range(NUM_FRAMES)]
    for name, speed, lane in zip((colour, other), (1, 0), rng.sample((0, LANE), 2), strict=True):
        fill, size = vary(rng, name), rng.randint(*SIZES)
        for frame, corner in zip(frames, find_corners(rng, size, speed, lane), strict=True):
            left, top = corner[::flip]
            ImageDraw.Draw(frame).rectangle((left, top, left + size - 1, top + size - 1), fill=fill)
    return frames


def find_corners(rng: random.Random, size: int, speed: int, lane: int) -> list[Corner]:
    """Where a square is in each frame, along its way and across: it starts at an end of its way."""
    start = rng.randint(0, IMAGE_SIZE - TURN * STEP - size)
    across = lane + rng.randint(0, LANE - size)
    phase = rng.choice((0, TURN))
    turns = [(phase + speed * number) % (2 * TURN) for number in range(NUM_FRAMES)]
    return [(start + STEP * min(turn, 2 * TURN - turn), across) for turn in turns]


def save_video(frames: list[Image.Image], path: Path) -> None:
    """Encode frames as MPEG-4, four a second, each alone: else only what moves would be blurred."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4, options={"qscale": "2"})
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        stream.codec_context.gop_size = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        container.mux(stream.encode())


def write_video_questions(folder: Path, name: str, count: int, seed: int) -> Path:
    """Write `count` questions as `<name>.jsonl`, with their videos beside it; returns the file.

    The colours are equally frequent: answering always the same is right once in four, and naming either
    square twice in four.
    """
    rng = random.Random(seed)
    videos = folder / "videos"
    videos.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        colour = list(COLOURS)[number % len(COLOURS)]
        path = videos / f"{name}_{number:03d}.mp4"
        save_video(draw_frames(rng, colour), path)
        rows.append({"problem": QUESTION, "answer": colour, "videos": [path.name]})
    rng.shuffle(rows)
    return save_rows(rows, folder / f"{name}.jsonl")
