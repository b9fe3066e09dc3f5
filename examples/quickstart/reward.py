# SPDX-License-Identifier: Apache-2.0
"""Reward of the quickstart: overall = 0.9 accuracy + 0.1 format, where any colour word is well-formed."""

from typing import Any

REWARD_NAME = "colour"
REWARD_TYPE = "batch"

COLOURS = ("red", "green", "blue", "yellow")


def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Score each response: its first word against the row's answer."""
    scores = []
    for reward_input in reward_inputs:
        words = reward_input["response"].split()
        answer = words[0] if words else ""
        accuracy, form = float(answer == reward_input["ground_truth"]), float(answer in COLOURS)
        scores.append({"overall": 0.9 * accuracy + 0.1 * form, "accuracy": accuracy, "format": form})
    return scores
