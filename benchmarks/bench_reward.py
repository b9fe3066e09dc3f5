# SPDX-License-Identifier: Apache-2.0
"""Reward of the benchmark: cheap, and different for each response."""

from typing import Any

REWARD_NAME = "variety"
REWARD_TYPE = "batch"


def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the fraction of distinct characters in each response."""
    return [{"overall": len(set(item["response"])) / max(1, len(item["response"]))} for item in reward_inputs]
