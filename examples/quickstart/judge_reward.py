# SPDX-License-Identifier: Apache-2.0
"""Reward of a judge that says yes or no.

overall = verdict

verdict    1 if the judge says yes, else 0
accuracy   1 if the last number of the response is right, else 0; it is measured only
agrees     1 if both are equal
"""

from typing import Any

from sums_reward import is_right

REWARD_NAME = "judge"
REWARD_TYPE = "sequential"


def question(problem: str, reference: str, answer: str) -> str:
    """Return what the judge is asked."""
    return (
        f"Question: {problem}\nReference: {reference}\nAnswer: {answer}\nIs the answer right? Say yes or no."
    )


async def compute_score(row: dict[str, Any], servers: dict[str, Any]) -> dict[str, float]:
    asked = question(row["problem"], row["ground_truth"], row["response"])
    verdict = float((await servers["judge"].ask([{"role": "user", "content": asked}])).startswith("yes"))
    accuracy = float(is_right(row["response"], row["ground_truth"]))
    return {
        "overall": verdict,
        "accuracy": accuracy,
        "verdict": verdict,
        "agrees": float(verdict == accuracy),
    }
