# SPDX-License-Identifier: Apache-2.0
"""Reward of the quickstart with pictures: overall = 1 - mean |mean color of the picture - named color|.

Of a video it is the mean over the frames. The accuracy is 1 if no other color is nearer.
"""

from typing import Any

import torch
from shapes import COLORS

REWARD_NAME = "painting"
REWARD_TYPE = "sequential"

NAMES = list(COLORS)
VALUES = torch.tensor(list(COLORS.values())) / 255  # (colors, 3)


def compute_score(reward_input: dict[str, Any]) -> dict[str, float]:
    """Compare a picture (3, H, W) or a video (F, 3, H, W) in [0, 1] with the color that its prompt names."""
    pixels = reward_input["videos"] if "videos" in reward_input else reward_input["images"]
    colors = pixels.mean((-1, -2)).reshape(-1, 1, 3)  # of each frame
    distances = (colors - VALUES).abs().mean((0, -1))  # (colors,)
    named = NAMES.index(reward_input["ground_truth"])
    return {"overall": 1 - float(distances[named]), "accuracy": float(distances.argmin() == named)}
