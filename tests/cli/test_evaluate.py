# SPDX-License-Identifier: Apache-2.0
"""The report of an evaluation, and its command up to the first worker."""

import json
import math

import pytest

from tests.helpers.light_process import run_light
from verl.cli.evaluate import main, names
from verl.trainer.evaluation.model_folder import actor_folder, loadable
from verl.trainer.evaluation.report import (
    Evaluation,
    ScoredResponse,
    by_category,
    mean_pass_at_k,
    pass_at_k,
    powers_up_to,
    summarize,
)

HALF = 0.5


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 - (3 / 4) * (2 / 3)),  # neither of two drawn without replacement is the right one
        (5, 2, 3, 1 - 1 / 10),  # one of the ten triples has none of the two
        (5, 3, 3, 1.0),  # two wrong ones cannot fill three
        (6, 0, 6, 0.0),
        (200, 50, 10, 1 - math.prod((150 - i) / (200 - i) for i in range(10))),  # the paper's product
    ],
)
def test_pass_at_k_is_the_chance_that_one_of_k_draws_without_replacement_is_correct(n, correct, k, expected):
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_refuses_what_has_no_meaning():
    for n, correct, k in ((2, 1, 3), (2, 3, 1), (2, 1, 0)):
        with pytest.raises(ValueError, match="pass@k needs"):
            pass_at_k(n, correct, k)


def test_prompts_with_too_few_scored_responses_are_left_out_of_the_mean():
    assert mean_pass_at_k([(2, 1), (1, 1)], 2) == 1.0
    assert mean_pass_at_k([(1, 1)], 2) is None
    assert [powers_up_to(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def responses():
    """Two prompts of two categories with two responses each; one could not be scored."""
    return [
        ScoredResponse("a", 1.0, 1.0),
        ScoredResponse("a", 0.2, HALF),
        ScoredResponse("b", 0.0, 0.0),
        ScoredResponse("b", math.nan, math.nan),
    ]


LEVELS = ["easy", "easy", "(none)", "(none)"]


def test_the_summary_counts_correct_responses_by_the_chosen_value_and_leaves_out_failures():
    strict, lenient = summarize(responses(), 1.0, [1, 2]), summarize(responses(), HALF, [1])

    assert (strict.prompts, strict.responses, strict.failed) == (2, 4, 1)
    assert strict.mean == pytest.approx(1.2 / 3)
    assert strict.correct == pytest.approx(1 / 3)
    assert strict.pass_at == {1: pytest.approx((0.5 + 0) / 2), 2: 1.0}  # only prompt a has two
    assert lenient.correct == pytest.approx(2 / 3) and lenient.pass_at == {1: 0.5}
    parts = by_category(responses(), LEVELS, 1.0, [1])
    assert list(parts) == ["(none)", "easy"]
    assert parts["easy"].mean == pytest.approx(0.6) and parts["(none)"].failed == 1


def test_the_table_and_the_file_have_the_same_figures(tmp_path):
    parts = {"level": by_category(responses(), LEVELS, 1.0, [1, 2])}
    whole = summarize(responses(), 1.0, [1, 2])
    report = Evaluation("m", 3, {"val/reward_score": 0.4}, "accuracy", 1.0, whole, parts, tmp_path)

    read = json.loads(report.write().read_text())

    assert read == report.as_dict()
    assert read["overall"]["pass_at"] == {"1": 0.25, "2": 1.0}
    assert report.table().splitlines() == [
        "          prompts  responses   score  correct  pass@1  pass@2",
        "  (none)        1          2  0.0000   0.0000  0.0000       -",
        "  easy          1          2  0.6000   0.5000  0.5000  1.0000",
        "  all           2          4  0.4000   0.3333  0.2500  1.0000",
        "  1 of 4 responses could not be scored and are left out",
    ]


def test_lines_of_several_columns_begin_with_the_column(tmp_path):
    whole, part = summarize(responses(), 1.0, [1]), summarize(responses()[:2], 1.0, [1])
    parts = {"duration": {"long": part, "short": whole}, "domain": {"Knowledge": whole}}

    lines = Evaluation("m", 3, {}, "accuracy", 1.0, whole, parts, tmp_path).table().splitlines()

    assert [line.split("  ")[1] for line in lines[1:5]] == [
        "duration: long", "duration: short", "domain: Knowledge", "all",
    ]  # fmt: skip


def test_names_of_columns_are_read():
    assert names("duration, domain,") == ["duration", "domain"]


def test_a_checkpoint_is_known_by_any_of_its_folders_and_an_exported_one_is_not_merged_again(tmp_path):
    step = tmp_path / "first" / "global_step_7"
    exported = step / "actor" / "huggingface"
    exported.mkdir(parents=True)
    (step / "actor" / "manifest.json").write_text("{}")
    (exported / "model.safetensors").touch()

    for name in (step, step / "actor", exported):
        assert actor_folder(str(name)) == step / "actor"
        with loadable(str(name)) as model:
            assert model == (str(exported), "first_global_step_7", 7)
    with loadable("Qwen/Qwen3-4B") as model:
        assert model == ("Qwen/Qwen3-4B", "Qwen3-4B", 0)
    with loadable(str(tmp_path)) as model:
        assert model == (str(tmp_path), tmp_path.name, 0)


def test_wrong_options_are_told_before_anything_is_loaded(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert main(["worker.rollout.num_generations=2", "--model", "m", "--samples", "3"]) == 2

    told = capsys.readouterr().err
    assert "`worker.rollout.n`" in told
    assert "`data.val_files` must be set" in told and "train_files" not in told
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_pass_at_k_are_read_and_checked(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--k", "1,0"])

    assert end.value.code == 2 and "must be at least 1, got 0" in capsys.readouterr().err


def test_help_imports_little():
    code = "from verl.cli.evaluate import main; main(['--help'])"

    assert "--samples" in run_light(code, most_modules=600).stdout
