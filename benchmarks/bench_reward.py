# SPDX-License-Identifier: Apache-2.0
"""Reward of the benchmark: something that differs between responses and costs nothing."""

from typing import Any

REWARD_NAME = "variety"
REWARD_TYPE = "batch"


def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Score each response by the share of different characters in it."""
    return [{"overall": len(set(item["response"])) / max(1, len(item["response"]))} for item in reward_inputs]
