# SPDX-License-Identifier: Apache-2.0
"""Scores each response with the reward function of its row's source, for mixtures of data.

    worker.reward.reward_function=examples/reward_function/by_source.py:compute_score
    worker.reward.reward_function_kwargs='{functions: {
        maths: {function: examples/reward_function/math.py:compute_score, format_weight: 0.2},
        code: examples/reward_function/code.py:compute_score}}'

The names are those of `data.sources`, or the values of another `column` such as `data_source`. A score that
only some functions return is logged as the mean of their own responses.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from verl.rewards.function import RewardFunction, load_reward_function

REWARD_NAME = "by_source"
REWARD_TYPE = "batch"


def compute_score(
    reward_inputs: list[dict[str, Any]],
    functions: Mapping[str, str | Mapping[str, Any]],
    column: str = "source",
) -> list[dict[str, float]]:
    rows: dict[Any, list[int]] = {}
    for row, reward_input in enumerate(reward_inputs):
        rows.setdefault(reward_input.get(column), []).append(row)
    unknown = [name for name in rows if name not in functions]
    if unknown:
        raise ValueError(
            f"`functions` must have the sources {unknown} of `{column}`, has {sorted(functions)}"
        )
    scores: dict[int, dict[str, float]] = {}
    for name, own in rows.items():
        function = load(json.dumps(functions[name]))
        found = function.score([reward_inputs[row] for row in own])
        scores |= dict(zip(own, found, strict=True))
    return [scores[row] for row in range(len(reward_inputs))]


@cache
def load(entry: str) -> RewardFunction:
    """Load the function of an entry, as JSON: its path, or a mapping of `function` and its arguments."""
    given = json.loads(entry)
    own = {"function": given} if isinstance(given, str) else given
    return load_reward_function(own.pop("function"), own)
