# SPDX-License-Identifier: Apache-2.0
"""Reward of the number game: overall = (1 - w) accuracy + w format; the name of any button is well-formed.

The weight w is 0.1; set another one with `worker.reward.reward_function_kwargs={format_weight: ...}`.
"""

from typing import Any

REWARD_NAME = "number_game"
REWARD_TYPE = "batch"

NAMES = ("red", "green", "blue")


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    """Compare the first word of each response with the name of the right button."""
    scores = []
    for reward_input in reward_inputs:
        words = reward_input["response"].lower().split()
        answer = words[0].strip(".,!") if words else ""
        accuracy, form = float(answer == reward_input["ground_truth"]), float(answer in NAMES)
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "accuracy": accuracy, "format": form})
    return scores
