# SPDX-License-Identifier: Apache-2.0
r"""Mathematics: an answer in `\boxed{}` after a `<think>` block, for `examples/format_prompt/math.jinja`.

overall = (1 - format_weight) * accuracy + format_weight * format        0.9 and 0.1 by default

accuracy   1 if the last `\boxed{}` equals the ground truth as text or mathematically, else 0
format     1 if the response is `<think>...</think>` followed by text with a `\boxed{}`, else 0; the tags may
           have spaces, `< think >`, as Qwen2.5-VL-32B writes them
"""

import re
from typing import Any

from verl.rewards.graders.math import last_boxed, same_answer

REWARD_NAME = "math"
REWARD_TYPE = "batch"
THINK, THOUGHT = re.compile(r"\s*+<\s*+think\s*+>"), re.compile(r"<\s*+/\s*+think\s*+>")
BOX = re.compile(r"\\boxed\s*+\{")


def accuracy_reward(response: str, ground_truth: str) -> float:
    answer = last_boxed(response)
    return float(answer is not None and same_answer(answer, ground_truth))


def format_reward(response: str) -> float:
    start = THINK.match(response)
    end = start and THOUGHT.search(response, start.end())
    box = end and BOX.search(response, end.end())
    return float(box is not None and response.find("}", box.end()) >= 0)


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        accuracy = accuracy_reward(reward_input["response"], str(reward_input["ground_truth"]))
        formatted = format_reward(reward_input["response"])
        overall = (1 - format_weight) * accuracy + format_weight * formatted
        scores.append({"overall": overall, "format": formatted, "accuracy": accuracy})
    return scores
