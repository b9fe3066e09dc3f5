# SPDX-License-Identifier: Apache-2.0
"""Score of `reasoning-gym` for rows that `examples/data_preprocess/reasoning_tasks.py` wrote.

The answer is the content of the last `<answer>...</answer>` of a response, or without one the whole response.
Some tasks score an answer that is nearly right between 0 and 1; `accuracy` counts only full scores.
"""

import json
from contextlib import suppress
from functools import cache
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.utils import extract_answer

REWARD_NAME = "reasoning_tasks"
REWARD_TYPE = "batch"

scorer = cache(get_score_answer_fn)


def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        entry = entry_of(reward_input["ground_truth"])
        tagged = extract_answer(reward_input["response"])
        answer = reward_input["response"].strip() if tagged is None else tagged
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
