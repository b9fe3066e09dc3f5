# SPDX-License-Identifier: Apache-2.0
r"""DAPO: the answer is the last line `Answer: ...`, else the last `\boxed{}`; long responses are penalized.

Use it with `examples/format_prompt/dapo.jinja`.

    overall = accuracy + overlong_penalty_factor * overlong

    accuracy              1 if the answer equals the ground truth as text or mathematically, else -1
    overlong              for L = response_length, M = max_response_length, b = overlong_buffer_length:
                          0 for L <= M - b;   (M - b - L) / b for M - b < L <= M;   -1 for L > M
    accuracy_normalized   (accuracy + 1) / 2, in [0, 1]; use it as `algorithm.filter_key`

Source: DAPO, section 3.4, equation 13 (https://arxiv.org/abs/2503.14476). Set `max_response_length` in
`worker.reward.reward_function_kwargs` to `data.max_response_length`.
"""

import re
from typing import Any

from verl.rewards.graders.math import last_boxed, same_answer

REWARD_NAME = "dapo"
REWARD_TYPE = "batch"
ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
ANSWER_WINDOW = 300  # characters at the end of a response; the longest answer of MATH-500 has 159


def accuracy_reward(response: str, ground_truth: str) -> float:
    answers = ANSWER.findall(response[-ANSWER_WINDOW:])
    answer = answers[-1] if answers else last_boxed(response)
    return 1.0 if answer is not None and same_answer(answer, ground_truth) else -1.0


def overlong_penalty(response_length: int, max_response_length: int, overlong_buffer_length: int) -> float:
    too_long = response_length - (max_response_length - overlong_buffer_length)  # tokens into the buffer
    return -min(max(too_long / overlong_buffer_length, 0.0), 1.0)


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float,
) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        accuracy = accuracy_reward(reward_input["response"], str(reward_input["ground_truth"]))
        overlong = overlong_penalty(
            reward_input["response_length"], max_response_length, overlong_buffer_length
        )
        scores.append(
            {
                "overall": accuracy + overlong_penalty_factor * overlong,
                "accuracy": accuracy,
                "overlong": overlong,
                "accuracy_normalized": (accuracy + 1) / 2,
            }
        )
    return scores
