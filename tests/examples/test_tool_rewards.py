# SPDX-License-Identifier: Apache-2.0
"""Reward functions of conversations look at the policy's last turn, not at what tools answered."""

from pathlib import Path

import pytest

from verl.rewards.function import load_reward_function

FOLDER = Path(__file__).parents[2] / "examples" / "reward_function"
CALL = {"name": "look", "arguments": {}}


def score(name, said, truth, calls=1, role="assistant"):
    reward = load_reward_function(f"{FOLDER / name}.py:compute_score", {})
    messages = [{"role": "user", "content": "?"}, {"role": role, "content": said}]
    given = {"messages": messages, "ground_truth": truth, "tool_calls": [CALL] * calls}
    (scores,) = reward.score([given | {"response": f"<answer>{truth}</answer>{said}", "response_length": 9}])
    return scores


@pytest.mark.parametrize(
    ("said", "truth", "accuracy"),
    [
        ("<answer>The Beatles.</answer>", ["Beatles", "Fab Four"], 1),
        ("<answer>Fab  four</answer>", ["Beatles", "Fab Four"], 1),
        ("<answer>Bern</answer> or <answer>Basel</answer>", ["Bern"], 0),
        ("Bern", "Bern", 0),
        ("<answer>Bern</answer>", "Bern", 1),
        ("", ["Bern"], 0),
    ],
)
def test_search_is_exact_match_with_any_of_the_answers(said, truth, accuracy):
    assert score("search", said, truth, 2) == {"overall": accuracy, "accuracy": accuracy, "searches": 2}


@pytest.mark.parametrize(
    ("said", "calls", "expected"),
    [
        ("So <answer>0.5</answer>", 1, (1.0, 1, 1, 1)),
        ("So <answer>0.5</answer>", 0, (0.9, 1, 1, 0)),
        ("<answer>2</answer> <answer>1/2</answer>", 1, (0.9, 1, 0, 1)),
        ("<answer>3</answer>", 1, (0.1, 0, 1, 0)),
        ("1/2", 1, (0.0, 0, 0, 0)),
    ],
)
def test_zoom_pays_for_a_call_only_if_the_answer_is_right(said, calls, expected):
    scores = score("zoom", said, "1/2", calls)

    names = ("overall", "accuracy", "format", "zoomed")
    assert tuple(scores[name] for name in names) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["search", "zoom"])
def test_an_answer_of_a_tool_is_not_the_policys(name):
    assert score(name, "<answer>1</answer>", "1", role="tool")["overall"] == 0
