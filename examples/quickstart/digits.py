# SPDX-License-Identifier: Apache-2.0
"""Real images for the quickstart: the 1,797 handwritten digits that scikit-learn ships."""

import random
from pathlib import Path

import numpy as np
from PIL import Image
from shapes import save_rows

QUESTION = "<image>Which digit is this?"
DIGITS = tuple("0123456789")
SIDE = 28  # pixels of an image, from 8
HIGHEST = 16  # gray level
EVERY = 5  # one digit of so many is held out


def write_digits(folder: Path, name: str, count: int, seed: int) -> Path:
    """Write questions to `<name>.jsonl` and their images to `images/`; returns the file.

    `val` has every fifth digit and `train` the others, at most `count` of them, in an order that follows from
    `seed`.

    Raises:
        SystemExit: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - of this demo only
    except ModuleNotFoundError as error:
        raise SystemExit(f"error: {error}: pip install -e '.[tasks]'") from error
    found = load_digits()
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (pixels, digit) in enumerate(zip(found.images, found.target, strict=True)):
        if (number % EVERY == 0) == (name == "val"):
            path = images / f"digit_{number:04d}.png"
            gray = np.rint(pixels * (255 / HIGHEST)).astype(np.uint8)
            Image.fromarray(gray).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path)
            rows.append({"problem": QUESTION, "answer": str(digit), "images": [path.name]})
    random.Random(seed).shuffle(rows)
    return save_rows(rows[:count], folder / f"{name}.jsonl")
