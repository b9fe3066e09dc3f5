# SPDX-License-Identifier: Apache-2.0
"""Reward of a whole game: that of each click; `right` and `won` are for people."""

from typing import Any

REWARD_NAME = "number_game"
REWARD_TYPE = "batch"


def compute_score(reward_inputs: list[dict[str, Any]], levels: int = 5) -> list[dict[str, Any]]:
    """Reward each turn as the environment does, which gives 1 for a right click."""
    scores = []
    for reward_input in reward_inputs:
        rewards = [reward or 0.0 for reward in reward_input["tool_rewards"]]
        right = sum(reward == 1.0 for reward in rewards)
        scores.append({"overall": rewards, "right": right / levels, "won": float(right == levels)})
    return scores
