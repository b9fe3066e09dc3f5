# SPDX-License-Identifier: Apache-2.0
"""Reward of the quickstart: overall = (1 - w) accuracy + w format; any word of the answers is well-formed.

The weight w is 0.1 and the words are colors; set others with
`worker.reward.reward_function_kwargs={format_weight: ..., words: [...]}`.
"""

from collections.abc import Sequence
from typing import Any

REWARD_NAME = "colour"
REWARD_TYPE = "batch"

COLORS = ("red", "green", "blue", "yellow")


def compute_score(
    reward_inputs: list[dict[str, Any]], format_weight: float = 0.1, words: Sequence[str] = COLORS
) -> list[dict[str, float]]:
    """Compare the first word of each response with the answer of the row."""
    scores = []
    for reward_input in reward_inputs:
        answer = next(iter(reward_input["response"].split()), "")
        accuracy, form = float(answer == reward_input["ground_truth"]), float(answer in words)
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "accuracy": accuracy, "format": form})
    return scores
