# SPDX-License-Identifier: Apache-2.0
"""Rewards of the turns of a conversation, from the function to the values of a batch."""

import math

import pytest

from verl.config.worker import RewardConfig
from verl.rewards.function import load_reward_function
from verl.rewards.manager import NoRewardFunction, RewardManager


def conversation(turns, **columns):
    return {"response": f"{turns} turns", "ground_truth": "x", "num_turns": turns, **columns}


def scored(reward_file, returned, inputs, head=""):
    path = reward_file(f"{head}\ndef main(inputs): return {returned}\n")
    return load_reward_function(path).score(inputs)


@pytest.mark.parametrize(
    ("head", "returned"),
    [
        ("", "[{'overall': [0.5, -2, 1.0], 'format': 1}]"),
        ("", "[{'overall': (0.5, -2, 1.0), 'format': 1}]"),
        ("import numpy", "[{'overall': numpy.array([0.5, -2, 1]), 'format': 1}]"),
        ("import torch", "[{'overall': torch.tensor([0.5, -2, 1]), 'format': 1}]"),
        ("REWARD_TYPE = 'sequential'", "{'overall': [0.5, -2, 1.0], 'format': 1}"),
        ("REWARD_TYPE = 'dataproto'", "{'reward': [[0.5, -2, 1.0]], 'format': [1]}"),
    ],
)
def test_a_list_gives_each_turn_its_reward_and_overall_is_the_sum(reward_file, head, returned):
    (scores,) = scored(reward_file, returned, [conversation(3)], head)

    assert scores == {
        "overall": -0.5, "format": 1.0, "overall/turn_1": 0.5, "overall/turn_2": -2.0, "overall/turn_3": 1.0,
    }  # fmt: skip


def test_a_number_rewards_the_conversation_as_a_whole(reward_file):
    assert scored(reward_file, "[{'overall': 2}]", [conversation(3)]) == [{"overall": 2.0}]
    assert scored(reward_file, "[{'overall': []}]", [conversation(0)]) == [{"overall": 0.0}]


@pytest.mark.parametrize(
    ("returned", "inputs", "message"),
    [
        (
            "[1.0, 2.0]", conversation(3),
            r"`overall` must hold one number for each turn \(3, as `num_turns` says\), or be a number for the"
            r" whole response, got \[1.0, 2.0\] for row 0.*response: '3 turns'",
        ),
        ("[1.0]", conversation(0), r"for each turn \(0"),
        ("[1.0, None]", conversation(2), r"`overall/turn_2` must be a finite number, got None for row 0"),
        ("[float('inf')]", conversation(1), "`overall/turn_1` must be a finite number, got inf"),
        (
            "[1.0]", {"response": "a"},
            r"must be a finite number for a response that is not a conversation of turns, got \[1.0\] for",
        ),
    ],
)  # fmt: skip
def test_wrong_rewards_of_turns_are_errors_that_name_row_and_rule(reward_file, returned, inputs, message):
    with pytest.raises(ValueError, match=rf"(?s)reward.py:main\):.*{message}"):
        scored(reward_file, f"[{{'overall': {returned}}}]", [inputs])


def test_the_names_of_the_rewards_of_turns_are_not_for_the_function(reward_file):
    with pytest.raises(ValueError, match=r"as a list, `overall`, got \['overall/turn_1'\] for row 0"):
        scored(reward_file, "[{'overall': 1.0, 'overall/turn_1': 1.0}]", [conversation(1)])


BY_LENGTH = """
    REWARD_TYPE = "sequential"
    def main(row):
        return {"overall": [1.0] * len(row["response"]) if row["response"] else 5.0}
    """


def job_of(manager, responses):
    job = manager.start()
    inputs = [{"response": text, "ground_truth": "", "num_turns": 2, "uid": "a"} for text in responses]
    job.submit(range(len(responses)), inputs)
    return job


def test_turns_that_a_conversation_does_not_have_are_nan(reward_file):
    with RewardManager(RewardConfig(reward_function=reward_file(BY_LENGTH), num_cpus=2)) as manager:
        values = job_of(manager, ["ab", "", "cd"]).result()

    assert values["overall"] == [2.0, 5.0, 2.0]
    assert values["overall/turn_1"][::2] == values["overall/turn_2"][::2] == [1.0, 1.0]
    assert math.isnan(values["overall/turn_1"][1]) and math.isnan(values["overall/turn_2"][1])


def test_a_wrong_number_of_rewards_is_a_failure_like_any_other(reward_file, tmp_path):
    path = reward_file(BY_LENGTH)
    options = {"num_cpus": 1, "max_failure_ratio": 0.5}
    masks = RewardConfig(reward_function=path, on_failure="mask", **options)
    with RewardManager(masks, tmp_path / "failures.jsonl") as manager:
        values = job_of(manager, ["ab", "abc", "cd"]).result()
    with RewardManager(RewardConfig(reward_function=path, num_cpus=1)) as manager:
        ends = job_of(manager, ["abc"])
        with pytest.raises(ValueError, match=r"one number for each turn \(2, .*got \[1.0, 1.0, 1.0\]"):
            ends.result()

    assert values["overall"][::2] == [2.0, 2.0] and math.isnan(values["overall"][1])
    assert values["failures"] == [0.0, 1.0, 0.0]
    assert all(math.isnan(values[f"overall/turn_{number}"][1]) for number in (1, 2))
    assert "one number for each turn" in (tmp_path / "failures.jsonl").read_text()


def test_without_a_reward_function_turns_earn_what_their_observations_give():
    job = NoRewardFunction().start()
    job.submit([2], [{"response": "one turn"}])
    job.submit(
        [1, 0], [conversation(2, tool_rewards=[None, None]), conversation(2, tool_rewards=[0.5, None])]
    )

    values = job.result()

    assert values["overall"] == [0.5, 0.0, 0.0]
    assert values["overall/turn_1"][0] == 0.5 and values["overall/turn_2"][0] == 0.0
    assert all(
        math.isnan(value) for name in ("overall/turn_1", "overall/turn_2") for value in values[name][1:]
    )
