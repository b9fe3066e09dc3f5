# SPDX-License-Identifier: Apache-2.0
"""The learning benchmark has a run for every name, which the config accepts, and keeps its table in order."""

import pytest

from benchmarks.learning import BEGIN, END, Outcome, all_cases, chosen_cases, prepare, row, write_rows
from benchmarks.learning_reward import compute_score
from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.trainer.main import main

OUTCOMES = [Outcome(0.0, 0.5, 0.0, 0.75, 30.0), Outcome(0.25, 1.0, 0.0, 1.0, 40.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("learning")
    prepare(path)
    return path


def test_every_estimator_and_every_loss_has_a_run():
    names = {f"estimator/{name}" for name in ADV_ESTIMATORS.names()}
    names |= {f"loss/{name}" for name in POLICY_LOSSES.names()}

    assert {case.name for case in all_cases()} == names


@pytest.mark.nightly("benchmarks", "verl/config")
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_the_config_accepts_every_run(case, folder, tmp_path, capsys):
    arguments = case.arguments(folder, tmp_path, steps=2, seed=1)

    assert main([*arguments, "--dry-run"]) == 0, capsys.readouterr().err


def test_a_name_without_its_kind_stands_for_all_of_that_name():
    assert [case.name for case in chosen_cases(["gpg", "loss/sapo"])] == [
        "estimator/gpg",
        "loss/gpg",
        "loss/sapo",
    ]


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(SystemExit, match=r"no run named grpoo; there are .*estimator/grpo"):
        chosen_cases(["grpoo", "rloo"])


def test_a_row_holds_means_over_seeds():
    (case,) = chosen_cases(["estimator/rloo"])

    # (0.0 + 0.25) / 2 = 0.125, (0.5 + 1.0) / 2 = 0.75, (0.75 + 1.0) / 2 = 0.875, (30 + 40) / 2 = 35
    assert row(case, OUTCOMES, [1, 2]) == (
        "| estimator/rloo | `adv_estimator=rloo` | 0.12 | 0.75 | 0.00 | 0.88 | 1 2 | 35 |"
    )


def test_rows_of_other_names_stay_and_all_stand_in_the_order_of_the_cases(tmp_path):
    file = tmp_path / "table.md"
    file.write_text(f"Before.\n\n{BEGIN}\n\n{END}\n\nAfter.\n")
    old = {"loss/sapo": "| loss/sapo | old |", "estimator/rloo": "| estimator/rloo | old |"}

    write_rows(file, old)
    write_rows(file, {"loss/sapo": "| loss/sapo | new |", "loss/cispo": "| loss/cispo | new |"})

    text = file.read_text()
    assert [line for line in text.splitlines() if line.startswith(("| e", "| l"))] == [
        "| estimator/rloo | old |",
        "| loss/cispo | new |",
        "| loss/sapo | new |",
    ]
    assert text.startswith(f"Before.\n\n{BEGIN}\n\n| run |") and text.endswith(f"{END}\n\nAfter.\n")


def test_a_file_without_a_place_for_the_table_is_refused(tmp_path):
    file = tmp_path / "table.md"
    file.write_text("Nothing.\n")

    with pytest.raises(ValueError, match="must hold the lines"):
        write_rows(file, {})


def test_a_reward_that_does_not_rise_enough_has_not_learned():
    assert Outcome(0.1, 0.35, 0.0, 0.25, 1.0).has_learned
    assert not Outcome(0.1, 0.25, 0.0, 0.25, 1.0).has_learned


def test_the_reward_counts_the_right_colour_and_any_colour():
    responses = ["red red red", "redblue", "nothing", "red red red red"]
    inputs = [{"response": response, "ground_truth": "red"} for response in responses]

    scores = compute_score(inputs, times=3)

    # overall = 0.9 accuracy + 0.1 format; the second: accuracy 1/3, format 2/3, 0.3 + 0.0667
    assert [score["overall"] for score in scores] == pytest.approx([1.0, 0.9 / 3 + 0.2 / 3, 0.0, 1.0])
    assert [score["accuracy"] for score in scores] == pytest.approx([1.0, 1 / 3, 0.0, 1.0])
