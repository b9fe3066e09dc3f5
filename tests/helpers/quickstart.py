# SPDX-License-Identifier: Apache-2.0
"""Inputs of a small run: the quickstart's questions and a tiny model."""

import sys
from pathlib import Path

from tests.helpers.training import QUICKSTART
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from shapes import COLORS, save_rows, vary, write_questions

__all__ = ["COLORS", "make_folder", "save_rows", "vary"]


def make_folder(folder: Path, family: str = "qwen2", *, train: int = 16, val: int = 5) -> Path:
    """Fill a folder with `model`, `train.jsonl` and `val.jsonl`, and return it.

    The questions have images unless the model's family is "qwen2".
    """
    save_tiny_model(folder / "model", family)
    for name, count, seed in (("train", train, 1), ("val", val, 2)):
        write_questions(folder, name, count, seed=seed, with_images=family != "qwen2")
    return folder
