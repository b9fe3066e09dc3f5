# SPDX-License-Identifier: Apache-2.0
"""What a small run needs: the quickstart's questions, and a tiny model to learn them."""

import sys
from pathlib import Path

from tests.helpers.training import QUICKSTART
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions


def make_folder(folder: Path, family: str = "qwen2", *, train: int = 16, val: int = 5) -> Path:
    """Fill a folder with `model`, `train.jsonl` and `val.jsonl`; returns it.

    Args:
        folder: To fill.
        family: Of the tiny model; the questions are about images unless it is "qwen2".
        train: Questions to learn.
        val: Questions held out.
    """
    save_tiny_model(folder / "model", family)
    for name, count, seed in (("train", train, 1), ("val", val, 2)):
        write_questions(folder, name, count, seed=seed, with_images=family != "qwen2")
    return folder
