# SPDX-License-Identifier: Apache-2.0
"""The quickstart's questions: the colour of a shape, in an image or in words. The same every time."""

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 210, 50)}
SHAPES = ("circle", "square", "triangle")
IMAGE_SIZE = 56  # pixels; four visual tokens of the tiny model


def draw(rng: random.Random, colour: str, shape: str) -> Image.Image:
    """A shape of any size and place, its colour a little off, on a grey of any lightness."""
    grey = rng.randint(0, 255)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (grey, grey, grey))
    fill = vary(rng, colour)
    size = rng.randint(24, 44)
    left, top = rng.randint(0, IMAGE_SIZE - size), rng.randint(0, IMAGE_SIZE - size)
    box = (left, top, left + size, top + size)
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    else:
        pen.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=fill)
    return image


def vary(rng: random.Random, colour: str) -> tuple[int, ...]:
    """A colour of that name, a little off."""
    return tuple(max(0, min(255, channel + rng.randint(-20, 20))) for channel in COLOURS[colour])


def write_questions(folder: Path, name: str, count: int, seed: int, *, with_images: bool) -> Path:
    """Write `count` questions as `<name>.jsonl`, with their images beside it; returns the file.

    The colours are equally frequent, so that answering always the same is right once in four.
    """
    rng = random.Random(seed)
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        colour, shape = list(COLOURS)[number % len(COLOURS)], rng.choice(SHAPES)
        if with_images:
            path = images / f"{name}_{number:03d}.png"
            draw(rng, colour, shape).save(path)
            row = {"problem": f"<image>What colour is the {shape}?", "answer": colour, "images": [path.name]}
        else:
            words = [shape, colour, rng.choice(("big", "small", "old", "new"))]
            rng.shuffle(words)
            row = {"problem": f"Look: {' '.join(words)}. What colour?", "answer": colour}
        rows.append(row)
    rng.shuffle(rows)
    return save_rows(rows, folder / f"{name}.jsonl")


def save_rows(rows: list[dict], path: Path) -> Path:
    """Write one JSON object a line; returns the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
