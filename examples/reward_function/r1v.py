# SPDX-License-Identifier: Apache-2.0
"""Visual questions: an answer in `<answer>` after a `<think>` block, for `examples/format_prompt/r1v.jinja`.

overall = (1 - format_weight) * accuracy + format_weight * format        both weights 0.5 by default

accuracy   1 if the content of the last `<answer>`, or the whole response if it has no tags, equals the ground
           truth as text or mathematically, else 0; `B. The man walks` equals `B`;
           the ground truth may have `<answer>` tags, too, as in R1-V and LongVideo-Reason
format     1 if the response is `<think>...</think><answer>...</answer>`, else 0
"""

import re
from typing import Any

from verl.rewards.graders.math import same_answer

REWARD_NAME = "r1v"
REWARD_TYPE = "sequential"
THOUGHT = re.compile(r"</think>\s*+<answer>")
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def accuracy_reward(response: str, ground_truth: str) -> float:
    answers, truths = ANSWER.findall(response), ANSWER.findall(ground_truth)
    if not answers and "<think>" in response:
        return 0.0
    return float(same_answer((answers or [response])[-1], (truths or [ground_truth])[-1]))


def format_reward(response: str) -> float:
    response = response.strip()
    is_framed = response.startswith("<think>") and response.endswith("</answer>")
    return float(is_framed and THOUGHT.search(response) is not None)


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    accuracy = accuracy_reward(reward_input["response"], str(reward_input["ground_truth"]))
    formatted = format_reward(reward_input["response"])
    overall = (1 - format_weight) * accuracy + format_weight * formatted
    return {"overall": overall, "format": formatted, "accuracy": accuracy}
