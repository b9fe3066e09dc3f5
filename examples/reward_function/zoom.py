# SPDX-License-Identifier: Apache-2.0
"""Visual questions with the tool `zoom`, for `examples/format_prompt/zoom.jinja`.

overall = 0.8 * accuracy + 0.1 * format + tool_weight * zoomed        tool_weight is 0.1 by default

accuracy   1 if the content of the last `<answer>` of the policy's last turn equals the ground truth as text
           or mathematically, else 0
format     1 if that turn has exactly one `<answer>...</answer>`, at its end, else 0
zoomed     1 if the answer is right and a call was made, else 0: looking closer pays only if it helps
"""

import re
from typing import Any

from verl.rewards.graders.math import same_answer

REWARD_NAME = "zoom"
REWARD_TYPE = "sequential"
ACCURACY_WEIGHT, FORMAT_WEIGHT = 0.8, 0.1
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def accuracy_reward(said: str, ground_truth: str) -> float:
    answers = ANSWER.findall(said)
    return float(bool(answers) and same_answer(answers[-1], ground_truth))


def format_reward(said: str) -> float:
    return float(len(ANSWER.findall(said)) == 1 and said.rstrip().endswith("</answer>"))


def last_turn(reward_input: dict[str, Any]) -> str:
    """Return the policy's last turn, without what tools answered before; a plain response is one turn."""
    last = reward_input.get("messages", [{"role": "assistant", "content": reward_input["response"]}])[-1]
    return last["content"] if last["role"] == "assistant" else ""


def compute_score(reward_input: dict[str, Any], tool_weight: float = 0.1) -> dict[str, float]:
    said = last_turn(reward_input)
    accuracy = accuracy_reward(said, str(reward_input["ground_truth"]))
    formatted = format_reward(said)
    zoomed = accuracy * (len(reward_input.get("tool_calls", [])) > 0)
    overall = ACCURACY_WEIGHT * accuracy + FORMAT_WEIGHT * formatted + tool_weight * zoomed
    return {"overall": overall, "accuracy": accuracy, "format": formatted, "zoomed": zoomed}
