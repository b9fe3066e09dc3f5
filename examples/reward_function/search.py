# SPDX-License-Identifier: Apache-2.0
"""Questions to answer with a search, for `examples/format_prompt/search.jinja`: exact match, as in Search-R1.

overall = accuracy

accuracy   1 if the content of the last `<answer>` of the policy's last turn equals one of the ground truths,
           else 0; letter case, articles, punctuation and spaces do not count
searches   number of calls, for the log only
"""

import re
import string
from collections.abc import Iterable
from typing import Any

REWARD_NAME = "search"
REWARD_TYPE = "sequential"
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
ARTICLE = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    return " ".join(ARTICLE.sub(" ", text.lower().translate(PUNCTUATION)).split())


def accuracy_reward(said: str, ground_truths: Iterable[str]) -> float:
    answers = ANSWER.findall(said)
    return float(bool(answers) and normalized(answers[-1]) in map(normalized, ground_truths))


def last_turn(reward_input: dict[str, Any]) -> str:
    """Return the policy's last turn, without what tools answered before; a plain response is one turn."""
    last = reward_input.get("messages", [{"role": "assistant", "content": reward_input["response"]}])[-1]
    return last["content"] if last["role"] == "assistant" else ""


def compute_score(reward_input: dict[str, Any]) -> dict[str, float]:
    truths = reward_input["ground_truth"]
    said = last_turn(reward_input)
    accuracy = accuracy_reward(said, [truths] if isinstance(truths, str) else map(str, truths))
    return {
        "overall": accuracy,
        "accuracy": accuracy,
        "searches": float(len(reward_input.get("tool_calls", []))),
    }
