# SPDX-License-Identifier: Apache-2.0
"""Inputs of a reward function that scores pictures or videos, and blank ones to call it with before a run."""

from typing import Any

import torch
from torch import Tensor

from verl.config.worker import WorkerConfig
from verl.diffusion.families.registry import family_of
from verl.diffusion.files import downloaded
from verl.diffusion.options import size_of
from verl.trainer.reward_samples import Response, SampledRows

SHADES = {"black": 0.0, "gray": 0.5, "white": 1.0}


def picture_columns(pixels: Tensor) -> dict[str, Any]:
    """Return the inputs that stand for a response: an image (3, H, W), or a video (F, 3, H, W), in [0, 1]."""
    return {"images" if pixels.ndim == 3 else "videos": pixels, "response": "", "response_length": 0}


def sample_pictures(rows: SampledRows, count: int, worker: WorkerConfig) -> list[Response]:
    """Make three blank pictures, of the run's size, for each of the first usable rows."""
    family = family_of(downloaded(worker.actor.model))
    size = size_of(worker.rollout, family)
    image = torch.ones(3, size.height, size.width)
    blank = image if family.makes == "images" else image.expand(size.frames, -1, -1, -1)
    return [
        Response(f"row {row}, {name}", row, row, columns | picture_columns(shade * blank))
        for row, columns in rows.first(count).items()
        for name, shade in SHADES.items()
    ]
