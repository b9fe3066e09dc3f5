# SPDX-License-Identifier: Apache-2.0
"""Score of `reasoning-gym` for rows that `examples/data_preprocess/reasoning_tasks.py` wrote.

The answer is the content of the last `<answer>...</answer>` of a response, or without one the whole response.
Some tasks score an answer that is nearly right between 0 and 1; `accuracy` counts only full scores.
"""

import json
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
        entry = json.loads(reward_input["ground_truth"])
        tagged = extract_answer(reward_input["response"])
        answer = reward_input["response"].strip() if tagged is None else tagged
        score = float(scorer(entry["task"])(answer, entry))
        scores.append({"overall": score, "accuracy": float(score == 1)})
    return scores
