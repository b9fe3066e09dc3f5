# SPDX-License-Identifier: Apache-2.0
"""The demo of six tasks of reasoning-gym: its questions, their scores, and accuracies by task."""

import json
import sys
from collections import Counter

from examples.reward_function.reasoning_tasks import compute_score
from tests.helpers.training import QUICKSTART

sys.path.insert(0, str(QUICKSTART))
import tasks

NAMES = [task.partition(":")[0] for task in tasks.TASKS]


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_each_task_has_as_many_questions_and_a_right_number_in_a_sentence_has_the_full_score(tmp_path):
    tasks.write_tasks(tmp_path, seed=0)
    train, val = rows_of(tmp_path, "train"), rows_of(tmp_path, "val")

    assert Counter(row["task"] for row in train) == dict.fromkeys(NAMES, tasks.NUM_ROWS)
    assert Counter(row["task"] for row in val) == dict.fromkeys(NAMES, tasks.NUM_HELD_OUT)
    assert not {row["problem"] for row in train} & {row["problem"] for row in val}
    rows = [
        {"ground_truth": row["answer"], "response": f"It is {json.loads(row['answer'])['answer']}."}
        for row in val
    ]
    assert all(score["accuracy"] == 1 for score in compute_score(rows, find="number"))


def test_the_accuracies_of_a_log_are_those_of_each_task_in_order():
    log = [
        {"step": 0, "val/task/gcd/accuracy_reward": 0.25, "val/task/gcd/overall_reward": 0.5},
        {"step": 1, "reward/overall": 0.5},
        {"step": 2, "val/task/gcd/accuracy_reward": 0.75, "val/task/lcm/accuracy_reward": 0.5},
    ]

    assert tasks.accuracies_by_task(log) == {"gcd": [0.25, 0.75], "lcm": [0.5]}
