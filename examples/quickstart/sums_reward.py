# SPDX-License-Identifier: Apache-2.0
"""Reward of sums: 1 if the last number of a response is right, else 0."""

import re
from typing import Any

REWARD_NAME = "sums"
REWARD_TYPE = "batch"


def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Compare the last number of each response with the answer of its row."""
    rights = [float(is_right(each["response"], each["ground_truth"])) for each in reward_inputs]
    return [{"overall": right, "accuracy": right} for right in rights]


def is_right(response: str, answer: str) -> bool:
    return re.findall(r"\d+", response)[-1:] == [answer]
