# SPDX-License-Identifier: Apache-2.0
"""Questions of the quickstart: the color of a shape in an image or in a sentence. Deterministic."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 210, 50)}
SHAPES = ("circle", "square", "triangle")
IMAGE_SIZE = 56  # pixels; four visual tokens of the tiny model


def draw(rng: random.Random, color: str, shape: str) -> Image.Image:
    """Draw a shape of random size and position on a random gray; its color varies a little."""
    gray = rng.randint(0, 255)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (gray, gray, gray))
    fill = vary(rng, color)
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


def vary(rng: random.Random, color: str) -> tuple[int, ...]:
    """Return a random variation of a color."""
    return tuple(max(0, min(255, channel + rng.randint(-20, 20))) for channel in COLORS[color])


def write_questions(folder: Path, name: str, count: int, seed: int, *, with_images: bool) -> Path:
    """Write `count` questions to `<name>.jsonl` and their images to `images/`; returns the file.

    The colors are equally frequent: always giving the same answer is right 1 time in 4.
    """
    rng = random.Random(seed)
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        color, shape = list(COLORS)[number % len(COLORS)], rng.choice(SHAPES)
        if with_images:
            path = images / f"{name}_{number:03d}.png"
            draw(rng, color, shape).save(path)
            row = {"problem": f"<image>What colour is the {shape}?", "answer": color, "images": [path.name]}
        else:
            words = [shape, color, rng.choice(("big", "small", "old", "new"))]
            rng.shuffle(words)
            row = {"problem": f"Look: {' '.join(words)}. What colour?", "answer": color}
        rows.append(row)
    rng.shuffle(rows)
    return save_rows(rows, folder / f"{name}.jsonl")


def write_rows_with_media(
    folder: Path,
    name: str,
    count: int,
    seed: int,
    *,
    question: str,
    answers: Sequence[str],
    media: str,
    suffix: str,
    save: Callable[[random.Random, str, Path], None],
) -> Path:
    """Write `count` questions to `<name>.jsonl` and their files to the folder `media`; returns the former.

    The answers are equally frequent; `save` writes the file of an answer.
    """
    rng = random.Random(seed)
    (folder / media).mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        answer, path = answers[number % len(answers)], folder / media / f"{name}_{number:03d}{suffix}"
        save(rng, answer, path)
        rows.append({"problem": question, "answer": answer, media: [path.name]})
    rng.shuffle(rows)
    return save_rows(rows, folder / f"{name}.jsonl")


def save_rows(rows: list[dict], path: Path) -> Path:
    """Write one JSON object per line and return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
