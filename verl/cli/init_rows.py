# SPDX-License-Identifier: Apache-2.0
"""The rows of `verl-init`: questions about colors, with images, videos or neither."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

Row = dict[str, Any]
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 210, 50)}
SHAPES = ("circle", "square", "triangle")
SIZES = ("big", "small", "old", "new")
PIXELS = 56  # of an image's side; four visual tokens of the tiny model
FRAMES, FRAMES_PER_SECOND = 8, 4


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write CSV or JSON lines, as the name says."""
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def image_rows(folder: Path, name: str, count: int, seed: int) -> list[Row]:
    rng, rows = random.Random(seed), []
    (folder / "images").mkdir(exist_ok=True)
    for number, colour in enumerate(_colours(rng, count)):
        file, shape, size = f"{name}_{number:02d}.png", rng.choice(SHAPES), rng.randint(40, 52)
        corner = rng.randint(0, PIXELS - size), rng.randint(0, PIXELS - size)
        draw(colour, shape, size, corner).save(folder / "images" / file)
        rows.append({"image": file, "question": f"What colour is the {shape}?", "answer": colour})
    return rows


def video_rows(folder: Path, name: str, count: int, seed: int) -> list[Row]:
    rng, rows = random.Random(seed), []
    (folder / "videos").mkdir(exist_ok=True)
    for number, colour in enumerate(_colours(rng, count)):
        file, shape = f"{name}_{number:02d}.mp4", rng.choice(SHAPES)
        top, steps = rng.randint(0, PIXELS - 32), [3 * frame for frame in range(FRAMES)]
        frames = [
            draw(colour, shape, 32, (left, top)) for left in (steps if rng.random() < 0.5 else steps[::-1])
        ]
        write_video(folder / "videos" / file, frames)
        rows.append({"video": file, "question": f"What colour is the {shape}?", "answer": colour})
    return rows


def text_rows(folder: Path, name: str, count: int, seed: int) -> list[Row]:
    rng, rows = random.Random(seed), []
    for colour in _colours(rng, count):
        words = [colour, rng.choice(SIZES), rng.choice(SHAPES)]
        rng.shuffle(words)
        rows.append({"question": f"Look: {' '.join(words)}. What colour?", "answer": colour})
    return rows


def conversation_rows(folder: Path, name: str, count: int, seed: int) -> list[Row]:
    return [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in text_rows(folder, name, count, seed)
    ]


WRITERS: dict[str, Callable[[Path, str, int, int], list[Row]]] = {
    "image": image_rows, "text": text_rows, "video": video_rows, "sft": conversation_rows,
}  # fmt: skip


def draw(colour: str, shape: str, size: int, corner: tuple[int, int]) -> Image.Image:
    image = Image.new("RGB", (PIXELS, PIXELS), "white")
    (left, top), pen, fill = corner, ImageDraw.Draw(image), COLOURS[colour]
    box = (left, top, left + size, top + size)
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    else:
        pen.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=fill)
    return image


def write_video(path: Path, frames: list[Image.Image]) -> None:
    import av  # noqa: PLC0415 - only videos need it

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FRAMES_PER_SECOND, bit_rate=400_000)
        stream.width, stream.height, stream.pix_fmt = PIXELS, PIXELS, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())


def _colours(rng: random.Random, count: int) -> list[str]:
    """Return colors in random order, each as often as the others."""
    colours = [list(COLOURS)[number % len(COLOURS)] for number in range(count)]
    rng.shuffle(colours)
    return colours
