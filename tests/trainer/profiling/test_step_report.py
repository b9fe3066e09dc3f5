# SPDX-License-Identifier: Apache-2.0
"""The report of a step adds up to the step, and names its bottlenecks."""

import re

import pytest

from verl.config.ppo import PPOConfig
from verl.config.schema import list_options
from verl.trainer.profiling.profiles import ADVICE, step_report

EVEN = {"step": 10.0, "gen": 4.0, "sync_weights": 1.0, "old": 1.5, "update_actor": 4.0, "adv": 0.25}
BALANCED = {"global_seqlen/balanced_max": 110.0, "global_seqlen/balanced_min": 100.0}


def report(**changed):
    metrics = {name: value for name, value in changed.items() if "/" in name}
    seconds = EVEN | {name: value for name, value in changed.items() if "/" not in name}
    return step_report(3, {f"timing_s/{name}": value for name, value in seconds.items()} | BALANCED | metrics)


def test_stages_are_sorted_by_their_time_and_the_rest_is_between_them():
    lines = report().splitlines()

    assert lines[0] == "step 3: 10.00 s"
    found = [re.fullmatch(r"  (.*?) +([\d.]+) s +([\d.]+)%( #+)?", line).groups()[:3] for line in lines[1:7]]
    assert found == [
        ("gen", "4.000", "40.0"),
        ("update_actor", "4.000", "40.0"),
        ("old", "1.500", "15.0"),
        ("sync_weights (inside gen)", "1.000", "10.0"),
        ("adv", "0.250", "2.5"),
        ("between the stages", "0.250", "2.5"),  # 10 - 4 - 4 - 1.5 - 0.25
    ]
    assert lines[-1] == "- no stage stands out"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"gen": 6.0}, "the rollout takes most"),
        ({"gen": 6.0, "response_length/clip_ratio": 0.3}, "`data.max_response_length`"),
        ({"gen": 6.0, "response_length/max": 310.0, "response_length/mean": 100.0}, "a few long responses"),
        ({"reward": 1.1}, "waits for rewards"),
        ({"old": 1.5, "ref": 1.5}, "passes without gradient"),
        ({"update_actor": 4.0, "update_critic": 1.5}, "updates take most"),
        ({"sync_weights": 2.0}, "reach the engine"),
        ({"save_checkpoint": 1.5}, "checkpoints hold"),
        ({"validation": 4.0}, "validation takes long"),
        ({"global_seqlen/balanced_max": 130.0}, "unequal work"),
    ],
)
def test_bottlenecks_are_named(changed, expected):
    assert expected in report(**changed)


def test_advice_names_options_that_exist():
    options = {entry.key for entry in list_options(PPOConfig)}
    named = {name for _, text in ADVICE for name in re.findall(r"`([\w.]+?)(?:=\w+)?`", text)}

    assert len(named) >= 12
    assert named <= options
