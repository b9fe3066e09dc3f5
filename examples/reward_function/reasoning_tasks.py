# SPDX-License-Identifier: Apache-2.0
"""Score of `reasoning-gym` for rows that `examples/data_preprocess/reasoning_tasks.py` wrote.

The answer is the content of the last `<answer>...</answer>` of a response, or without one the whole response;
with `find: number` or `find: word`, for models that answer in a sentence, its last number or word. Some tasks
score an answer that is nearly right between 0 and 1; `accuracy` counts only full scores.
"""

import json
import re
from contextlib import suppress
from functools import cache
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.utils import extract_answer

REWARD_NAME = "reasoning_tasks"
REWARD_TYPE = "batch"

scorer = cache(get_score_answer_fn)
FOUND = {"number": re.compile(r"-?\d+(?:\.\d+)?"), "word": re.compile(r"[A-Za-z]+")}


def compute_score(reward_inputs: list[dict[str, Any]], find: str | None = None) -> list[dict[str, float]]:
    if find is not None and find not in FOUND:
        raise ValueError(f"`find` must be one of {list(FOUND)}, got {find!r}")
    scores = []
    for reward_input in reward_inputs:
        entry = entry_of(reward_input["ground_truth"])
        answer = extract_answer(reward_input["response"])
        if answer is None:
            answer = reward_input["response"].strip()
            answer = answer if find is None else (FOUND[find].findall(answer) or [""])[-1]
        score = float(scorer(entry["task"])(answer, entry))
        scores.append({"overall": score, "accuracy": float(score == 1)})
    return scores


def entry_of(ground_truth: str) -> dict[str, Any]:
    """Return what `reasoning-gym` needs to score a row.

    Raises:
        ValueError: The row was not written by `reasoning_tasks.py` of `examples/data_preprocess`.
    """
    with suppress(json.JSONDecodeError):
        entry = json.loads(ground_truth)
        if isinstance(entry, dict) and {"task", "answer", "metadata"} <= entry.keys():
            return entry
    raise ValueError(
        f"the answer {ground_truth[:60]!r} is not that of a reasoning-gym row; "
        "write the rows with examples/data_preprocess/reasoning_tasks.py"
    )
