# SPDX-License-Identifier: Apache-2.0
"""Reward of the quickstart with a tool: that of `reward.py` for the last turn, whatever came before it.

A right answer after a call earns `call_bonus` in addition, as in DeepEyes (https://arxiv.org/abs/2505.14362):
guesses are right as often without a call, and a call must be tried until answers after it are better.
"""

from typing import Any

from reward import REWARD_TYPE
from reward import compute_score as score_answers

REWARD_NAME = "color_of_a_dot"

__all__ = ["REWARD_NAME", "REWARD_TYPE", "compute_score"]


def compute_score(
    reward_inputs: list[dict[str, Any]], format_weight: float = 0.1, call_bonus: float = 0.5
) -> list[dict[str, float]]:
    """Score the last turns of conversations, and responses of one turn as they are."""
    answers = [
        one | {"response": one["messages"][-1]["content"] if "messages" in one else one["response"]}
        for one in reward_inputs
    ]
    scores = score_answers(answers, format_weight)
    for score, one in zip(scores, reward_inputs, strict=True):
        score["called"] = float(bool(one.get("tool_calls")))
        score["overall"] += call_bonus * score["called"] * score["accuracy"]
    return scores
