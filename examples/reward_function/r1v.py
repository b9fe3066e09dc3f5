# SPDX-License-Identifier: Apache-2.0
"""Visual questions: an answer in `<answer>` after a `<think>` block, for `examples/format_prompt/r1v.jinja`.

overall = (1 - format_weight) * accuracy + format_weight * format        both weights 0.5 by default

accuracy   1 if the content of the last `<answer>` equals the ground truth, as text or mathematically, else 0;
           the ground truth may have `<answer>` tags, too, as in R1-V and LongVideo-Reason
format     1 if the response is `<think>...</think><answer>...</answer>`, else 0
"""

import re
from typing import Any

from verl.rewards.graders.math import last_boxed, same_answer

REWARD_NAME = "r1v"
REWARD_TYPE = "sequential"
FORMAT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def accuracy_reward(response: str, ground_truth: str) -> float:
    answers, truths = ANSWER.findall(response), ANSWER.findall(ground_truth)
    if not answers:
        return 0.0
    ground_truth = truths[-1] if truths else ground_truth
    return float(same_answer(last_boxed(answers[-1]) or answers[-1], ground_truth))


def format_reward(response: str) -> float:
    return float(FORMAT.fullmatch(response) is not None)


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    accuracy = accuracy_reward(reward_input["response"], str(reward_input["ground_truth"]))
    formatted = format_reward(reward_input["response"])
    overall = (1 - format_weight) * accuracy + format_weight * formatted
    return {"overall": overall, "format": formatted, "accuracy": accuracy}
