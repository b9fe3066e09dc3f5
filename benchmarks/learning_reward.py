# SPDX-License-Identifier: Apache-2.0
"""Reward of `learning.py`: the fraction of a response's tokens that name the right color.

overall = 0.9 * accuracy + 0.1 * format. Accuracy counts the right color, format any color, both divided by
`times`, the length of the longest response in tokens: in these questions, each word is one token.
"""

from typing import Any

REWARD_NAME = "repeated_colour"
REWARD_TYPE = "batch"

COLORS = ("red", "green", "blue", "yellow")


def compute_score(reward_inputs: list[dict[str, Any]], times: int) -> list[dict[str, float]]:
    """Score each response by its words, which need not be separated by spaces."""
    scores = []
    for reward_input in reward_inputs:
        counts = {color: reward_input["response"].count(color) for color in COLORS}
        accuracy = min(counts[reward_input["ground_truth"]] / times, 1.0)
        form = min(sum(counts.values()) / times, 1.0)
        scores.append({"overall": 0.9 * accuracy + 0.1 * form, "accuracy": accuracy, "format": form})
    return scores
