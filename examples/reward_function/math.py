# SPDX-License-Identifier: Apache-2.0
r"""Mathematics: an answer in `\boxed{}` after a `<think>` block, for `examples/format_prompt/math.jinja`.

overall = (1 - format_weight) * accuracy + format_weight * format        0.9 and 0.1 by default

accuracy   1 if the last `\boxed{}` equals the ground truth mathematically, else 0
format     1 if the response is `<think>...</think>` followed by text with a `\boxed{}`, else 0
"""

import re
from typing import Any

from verl.rewards.graders.math import last_boxed, same_answer

REWARD_NAME = "math"
REWARD_TYPE = "batch"
FORMAT = re.compile(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def accuracy_reward(response: str, ground_truth: str) -> float:
    answer = last_boxed(response)
    return float(answer is not None and same_answer(answer, ground_truth))


def format_reward(response: str) -> float:
    return float(FORMAT.fullmatch(response) is not None)


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        accuracy = accuracy_reward(reward_input["response"], str(reward_input["ground_truth"]))
        formatted = format_reward(reward_input["response"])
        overall = (1 - format_weight) * accuracy + format_weight * formatted
        scores.append({"overall": overall, "format": formatted, "accuracy": accuracy})
    return scores
