# SPDX-License-Identifier: Apache-2.0
"""A function written for TRL or verl is recognized, and the wrapper that the error prints works as it is."""

import textwrap

import pytest

from verl.rewards.function import load_reward_function

ROWS = [
    {"prompt": "2 + 2?", "response": "4", "ground_truth": "4", "level": 1, "data_source": "a", "uid": "0"},
    {"prompt": "3 + 3?", "response": "33", "ground_truth": "6", "level": 2, "data_source": "b", "uid": "1"},
]
NESTED = [row | {"ground_truth": {"style": "rule", "ground_truth": row["ground_truth"]}} for row in ROWS]
TRL = {
    "strings": (
        "def main(prompts, completions, **kwargs):\n"
        "    return [float(len(p) + len(c)) for p, c in zip(prompts, completions)]",
        [7.0, 8.0],  # the prompt's 6 characters, and those of the response
    ),
    "messages": (
        "def main(completions, **kwargs):\n    return [float(len(c[0]['content'])) for c in completions]",
        [1.0, 2.0],
    ),
    "the answer by a name of its own": (
        "def main(completions, solution):\n    return [float(c == s) for c, s in zip(completions, solution)]",
        [1.0, 0.0],
    ),
    "a column, and none": (
        "def main(completions, level, **kwargs):\n    return [None if n == 1 else n / 4 for n in level]",
        [0.0, 0.5],
    ),
    "async": (
        "async def main(prompts, completions):\n    return [len(c) for c in completions]",
        [1.0, 2.0],
    ),
}
VERL = {
    "a number": (
        "def main(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)",
        [{"overall": 1.0}, {"overall": 0.0}],
    ),
    "a dictionary with text": (
        "def main(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return {'score': len(solution_str), 'acc': solution_str == ground_truth, 'pred': data_source}",
        [{"overall": 1.0, "acc": 1.0}, {"overall": 2.0, "acc": 0.0}],
    ),
    "two arguments": (
        "def main(solution_str, ground_truth):\n    return len(ground_truth)",
        [{"overall": 1.0}] * 2,
    ),
    "async": (
        "async def main(data_source, solution_str, ground_truth, extra_info):\n    return data_source == 'a'",
        [{"overall": 1.0}, {"overall": 0.0}],
    ),
}


def scores_of_wrapper(reward_file, source, library, rows):
    """Scores of the file after what its error says was done."""
    path = reward_file(source)
    with pytest.raises(
        ValueError, match=rf"{path}:1 `main\(.*\)` has the arguments of .* for {library};"
    ) as caught:
        load_reward_function(path)
    advice, _, wrapper = str(caught.value).partition("`:\n\n")
    spec = advice.rpartition("`worker.reward.reward_function=")[2]

    reward_file(f"{textwrap.dedent(source)}\n\n\n{wrapper}")
    return load_reward_function(spec).score(rows)


@pytest.mark.parametrize("kind", TRL)
def test_the_wrapper_printed_for_a_function_of_trl_works(reward_file, kind):
    source, expected = TRL[kind]

    scores = scores_of_wrapper(reward_file, source, "TRL", ROWS)

    assert scores == [{"overall": score} for score in expected]


@pytest.mark.parametrize("kind", VERL)
@pytest.mark.parametrize("rows", [ROWS, NESTED], ids=["plain", "nested"])
def test_the_wrapper_printed_for_a_function_of_verl_works(reward_file, kind, rows):
    source, expected = VERL[kind]

    assert scores_of_wrapper(reward_file, source, "verl", rows) == expected


@pytest.mark.parametrize("arguments", ["completions", "completions, weight=1.0", "reward_inputs, **kwargs"])
def test_a_function_that_can_be_called_with_rows_is_left_alone(reward_file, arguments):
    path = reward_file(f"def main({arguments}): return [{{'overall': 1.0}} for _ in range(2)]")

    assert load_reward_function(path).score(ROWS) == [{"overall": 1.0}] * 2
