# SPDX-License-Identifier: Apache-2.0
"""A reward function is called by the convention that its file or its parameters tell."""

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


@pytest.mark.parametrize("kind", TRL)
def test_a_function_of_trl_is_called_as_trl_does(reward_file, kind):
    source, expected = TRL[kind]

    reward = load_reward_function(reward_file(source))

    assert reward.score(ROWS) == [{"overall": score} for score in expected]
    assert "has the arguments of a reward function for TRL" in reward.note


@pytest.mark.parametrize("kind", VERL)
@pytest.mark.parametrize("rows", [ROWS, NESTED], ids=["plain", "nested"])
def test_a_function_of_verl_is_called_as_verl_does(reward_file, kind, rows):
    source, expected = VERL[kind]

    reward = load_reward_function(reward_file(source))

    assert reward.score(rows) == expected
    assert "has the arguments of a reward function for verl" in reward.note


def test_arguments_of_the_config_reach_a_function_of_another_library(reward_file):
    path = reward_file("def main(solution_str, ground_truth, weight): return weight")

    assert load_reward_function(path, {"weight": 0.5}).score(ROWS) == [{"overall": 0.5}] * 2


@pytest.mark.parametrize(
    ("source", "reward_type"),
    [
        ("def main(item): return float(item['response'] == item['ground_truth'])", "sequential"),
        ("def main(data, **_): return {'reward': [float(x[0] == '2') for x in data.prompts]}", "dataproto"),
        ("def main(items): return [float(x['response'] == x['ground_truth']) for x in items]", "batch"),
    ],
)  # fmt: skip
def test_without_a_type_the_first_parameter_tells_it_and_a_number_is_a_score(
    reward_file, source, reward_type
):
    reward = load_reward_function(reward_file(source))

    assert reward.score(ROWS) == [{"overall": 1.0}, {"overall": 0.0}]
    assert reward.reward_type == reward_type
    assert (reward.note is None) == (reward_type == "batch")


def test_a_type_that_the_file_names_wins_over_its_parameters(reward_file):
    path = reward_file("REWARD_TYPE = 'batch'\ndef main(item): return [{'overall': 1.0} for _ in item]")

    assert load_reward_function(path).score(ROWS) == [{"overall": 1.0}] * 2


@pytest.mark.parametrize("arguments", ["completions", "completions, weight=1.0", "reward_inputs, **kwargs"])
def test_a_function_that_can_be_called_with_rows_is_left_alone(reward_file, arguments):
    path = reward_file(f"def main({arguments}): return [{{'overall': 1.0}} for _ in range(2)]")

    assert load_reward_function(path).score(ROWS) == [{"overall": 1.0}] * 2
