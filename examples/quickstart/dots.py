# SPDX-License-Identifier: Apache-2.0
"""Questions of the quickstart with a tool: the color of a dot too small to be seen. Deterministic.

The pictures have 448 x 448 pixels and a dot of 2 x 2 in their center. The policy sees them shrunk to 56 x 56,
where the dot changes one pixel by a sixteenth; the tool `zoom` shows it the center.
"""

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw
from shapes import COLORS, save_rows, vary

IMAGE_SIZE, DOT_SIZE = 448, 2  # pixels
BOX = [496, 496, 504, 504]  # twice the dot's size, in thousandths of the sides


def call_of(box: list[int]) -> str:
    """Return a call of `zoom` as the policy writes it."""
    call = json.dumps({"name": "zoom", "arguments": {"box": box}})
    return f"<tool_call>\n{call}\n</tool_call>"


CALL = call_of(BOX)


def draw(rng: random.Random, color: str) -> Image.Image:
    """Draw a dot in the center of a random gray; its color varies a little."""
    gray = rng.randint(0, 255)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (gray, gray, gray))
    start = (IMAGE_SIZE - DOT_SIZE) // 2
    box = (start, start, start + DOT_SIZE - 1, start + DOT_SIZE - 1)
    ImageDraw.Draw(image).rectangle(box, fill=vary(rng, color))
    return image


def write_dots(folder: Path, name: str, count: int, seed: int) -> Path:
    """Write `count` questions to `<name>.jsonl` and their images to `images/`; returns the file."""
    rng = random.Random(seed)
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        color, path = list(COLORS)[number % len(COLORS)], images / f"{name}_{number:03d}.png"
        draw(rng, color).save(path)
        rows.append({"problem": "<image>What colour?", "answer": color, "images": [path.name]})
    rng.shuffle(rows)
    return save_rows(rows, folder / f"{name}.jsonl")
