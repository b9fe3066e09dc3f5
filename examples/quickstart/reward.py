# SPDX-License-Identifier: Apache-2.0
"""Reward of the quickstart: overall = (1 - w) accuracy + w format, where any colour word is well-formed.

The weight w is 0.1, or what `worker.reward.reward_function_kwargs={format_weight: ...}` says.
"""

from typing import Any

REWARD_NAME = "colour"
REWARD_TYPE = "batch"

COLOURS = ("red", "green", "blue", "yellow")


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    """Score each response: its first word against the row's answer."""
    scores = []
    for reward_input in reward_inputs:
        words = reward_input["response"].split()
        answer = words[0] if words else ""
        accuracy, form = float(answer == reward_input["ground_truth"]), float(answer in COLOURS)
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "accuracy": accuracy, "format": form})
    return scores
