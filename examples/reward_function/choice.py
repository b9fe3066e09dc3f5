# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: the letter of the answer, for `examples/format_prompt/r1v.jinja` and `r1v_video.jinja`.

overall = (1 - format_weight) * accuracy + format_weight * format          format_weight 0.1 by default

accuracy   1 if the content of the last `<answer>`, or the whole response if it has no tags, names the letter
           of the ground truth, else 0: `B`, `(B)`, `B. He runs`, `Therefore the final answer is: B`, or the
           text of the choice if the rows have a column `choices`; a truth other than a letter is compared
           as text or mathematically, as by `r1v.py`
format     1 if the response is `<think>...</think><answer>...</answer>`, else 0
answered   1 if the response names one choice, right or wrong
"""

import re
from typing import Any

from verl.rewards.graders.choices import choice_letter
from verl.rewards.graders.math import same_answer

REWARD_NAME = "choice"
REWARD_TYPE = "sequential"
THOUGHT = re.compile(r"</think>\s*+<answer>")
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def format_reward(response: str) -> float:
    is_framed = response.startswith("<think>") and response.endswith("</answer>")
    return float(is_framed and THOUGHT.search(response) is not None)


def answer_of(text: str) -> str:
    """Return the content of the last `<answer>`; nothing of a response that ended in its thoughts."""
    answers = ANSWER.findall(text)
    if not answers and "<think>" in text:
        return ""
    return (answers or [text])[-1].strip()


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.1) -> dict[str, float]:
    response = reward_input["response"].strip()
    answer, truth = answer_of(response), answer_of(str(reward_input["ground_truth"]))
    choices = reward_input.get("choices")
    letter, right = choice_letter(answer, () if choices is None else choices), choice_letter(truth)
    accuracy = float(same_answer(answer, truth) if right is None else letter == right)
    formatted = format_reward(response)
    overall = (1 - format_weight) * accuracy + format_weight * formatted
    answered = float(bool(answer) if right is None else letter is not None)
    return {"overall": overall, "accuracy": accuracy, "format": formatted, "answered": answered}
