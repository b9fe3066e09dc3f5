# SPDX-License-Identifier: Apache-2.0
"""Evaluations of checkpoints of real runs: the figures of the run's own validation, to the last digit."""

import json
import shutil

import pytest

import verl
from tests.helpers.training import read_metrics
from verl.trainer.evaluation.report import FILE
from verl.viewer.runs import open_runs

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def trained(ray_session, folder, tmp_path_factory):
    """The config of a run, its overrides and its result."""
    from tests.api.conftest import questions

    config, overrides = questions.__wrapped__(folder, tmp_path_factory.mktemp("evaluated"))
    overrides["data.category_keys"] = ["answer"]
    return config, overrides, verl.train(config, overrides)


def test_a_checkpoint_scores_as_in_the_runs_own_validation(trained, tmp_path):
    config, overrides, result = trained
    files = {path: path.stat().st_mtime_ns for path in result.checkpoint.rglob("*")}

    report = verl.evaluate(config, overrides, model=result.checkpoint, out=tmp_path / "evaluated")

    own = {key: value for key, value in read_metrics(result.folder)[2].items() if key.startswith("val")}
    assert report.metrics == own
    (by_answer,) = report.categories.values()
    names = {f"val/answer/{answer}/reward_score" for answer in by_answer}
    assert names <= set(own) and {own[name] for name in names} == {part.mean for part in by_answer.values()}
    assert report.overall.mean == own["val/reward_score"]
    assert report.step == 2 and report.overall.prompts == report.overall.responses == 5
    assert {path: path.stat().st_mtime_ns for path in result.checkpoint.rglob("*")} == files
    assert json.loads((tmp_path / "evaluated" / FILE).read_text()) == report.as_dict()


def test_samples_categories_and_responses_for_the_viewer(trained, tmp_path):
    config, overrides, result = trained
    sampled = {"worker.rollout.val_override_config": {"temperature": 1.0}, "worker.rollout.seed": 5}

    report = verl.evaluate(
        config, overrides | sampled, model=result.checkpoint, samples=4, ks=[1, 3], by=["answer"], keep=2,
        out=tmp_path / "sampled",
    )  # fmt: skip

    assert report.overall.responses == 20 and list(report.overall.pass_at) == [1, 3]
    assert report.overall.pass_at[1] == pytest.approx(report.overall.correct)
    assert report.overall.pass_at[3] >= report.overall.pass_at[1]
    answers = report.categories["answer"]
    assert sum(part.responses for part in answers.values()) == 20
    for name, part in answers.items():
        assert report.metrics[f"val/answer/{name}/reward_score"] == pytest.approx(part.mean)
    (run,) = open_runs([report.folder])
    assert run.state()["num_rollouts"] == 8  # two prompts of four
    assert run.metrics()["step"] == [2]
    assert run.metrics()["metrics"]["val/reward_score"] == [pytest.approx(report.overall.mean)]


def test_what_cannot_be_evaluated_is_refused_with_the_remedy(trained, tmp_path):
    config, overrides, result = trained
    out = tmp_path / "refused"

    with pytest.raises(ValueError, match=r"4 responses to a prompt are all the same at temperature 0"):
        verl.evaluate(config, overrides, model=result.checkpoint, samples=4, out=out)
    with pytest.raises(ValueError, match=r"`level` cannot be a column of categories: .*'answer'"):
        verl.evaluate(config, overrides, model=result.checkpoint, by="level", out=out)
    damaged = shutil.copytree(result.checkpoint, tmp_path / "global_step_2")
    next((damaged / "actor").glob("*.distcp")).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match="is missing"):
        verl.evaluate(config, overrides, model=damaged, out=out)
