# SPDX-License-Identifier: Apache-2.0
"""Reward of `learning.py`: how often a response says the right color, out of the times it could.

overall = 0.9 * accuracy + 0.1 * format, of which accuracy counts the right color and format any color, each
divided by `times`, the tokens of the longest response: a word of these questions is one token.
"""

from typing import Any

REWARD_NAME = "repeated_colour"
REWARD_TYPE = "batch"

COLORS = ("red", "green", "blue", "yellow")


def compute_score(reward_inputs: list[dict[str, Any]], times: int) -> list[dict[str, float]]:
    """Score each response by its words, which may stand without spaces between them."""
    scores = []
    for reward_input in reward_inputs:
        counts = {color: reward_input["response"].count(color) for color in COLORS}
        accuracy = min(counts[reward_input["ground_truth"]] / times, 1.0)
        form = min(sum(counts.values()) / times, 1.0)
        scores.append({"overall": 0.9 * accuracy + 0.1 * form, "accuracy": accuracy, "format": form})
    return scores
