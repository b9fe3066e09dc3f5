# SPDX-License-Identifier: Apache-2.0
"""The mean over all held-out prompts, batch after batch."""

import math
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from tests.trainer.rollouts.sampling import Engine, make_config, make_sampler, numbered_prompts
from verl.protocol import objects
from verl.trainer import ray_trainer
from verl.trainer.evaluation.evaluator import Evaluator
from verl.trainer.evaluation.report import Question
from verl.trainer.metrics import StageTimer
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.rollouts.rollout_log import RolloutLog
from verl.trainer.rollouts.scores import Scoring
from verl.trainer.validation import NO_SCORE, Categories, Validator, means_by_category
from verl.viewer.rollout_store import VALIDATION, step_files


def test_batches_with_different_values_are_averaged_over_the_responses_that_have_them(reward_manager):
    # Only the second batch has responses with `rare`: scores of 1 and more.
    engine = Engine(lambda number: [0.5] if number < 2 else [1.5])
    config = make_config()
    sampler = make_sampler(config, engine, reward_manager)
    prompts = list(islice(numbered_prompts(2), 2))
    validator = Validator(sampler, sampler.engines, prompts, config.worker, dp_size=1, num_samples=1)

    validator.sample(step=4)
    metrics = validator.measure()

    assert metrics["val/reward_score"] == metrics["val/overall_reward"] == 1.0  # (0.5 + 0.5 + 1.5 + 1.5) / 4
    assert metrics["val/accuracy_reward"] == 0.5
    assert metrics["val/rare_reward"] == 1.0
    assert metrics["val_response_length/mean"] == pytest.approx((1 + 2 + 3 + 4) / 4)
    (sample,) = validator.samples
    assert sample.score in (0.5, 1.5) and sample.prompt.startswith("prompt")


def test_each_category_has_the_means_of_its_own_responses(reward_manager):
    # Prompts 0 and 1 score 0.5, prompts 2 and 3 score 1.5, which only there is accurate and has `rare`.
    engine = Engine(lambda number: [0.5] if number < 2 else [1.5])
    config = make_config()
    sampler = make_sampler(config, engine, reward_manager)
    columns = [
        {"length": ["short", None], "kind": ["A/B & C", "A/B & C"]},
        {"length": ["short", "long"], "kind": [None, ""]},
    ]
    prompts = [
        batch.merge({name: objects(values) for name, values in own.items()})
        for batch, own in zip(islice(numbered_prompts(2), 2), columns, strict=True)
    ]
    categories = Categories(("length", "kind", "answer"), "answer")
    validator = Validator(
        sampler, engine, prompts, config.worker, dp_size=1, num_samples=0, categories=categories
    )

    validator.sample(step=4)
    metrics = validator.measure()

    assert metrics["val/length/short/reward_score"] == metrics["val/length/short/overall_reward"] == 1.0
    assert metrics["val/length/short/accuracy_reward"] == 0.5
    assert metrics["val/length/none/accuracy_reward"] == 0.0
    assert metrics["val/length/long/accuracy_reward"] == metrics["val/length/long/rare_reward"] == 1.0
    assert "val/length/none/rare_reward" not in metrics
    assert metrics["val/kind/A_B _ C/reward_score"] == 0.5  # MLflow's names have no `&`
    assert metrics["val/kind/none/reward_score"] == 1.5
    assert metrics["val/answer/3/reward_score"] == 1.5  # the answers are the numbers of the prompts


def test_a_column_with_a_value_for_each_row_has_no_metrics_but_a_warning(caplog):
    names = {"id": [str(number) for number in range(101)], "half": ["a"] * 101}

    metrics = means_by_category(names, {"overall": [1.0] * 101}, [1.0] * 101)

    assert metrics == {"val/half/a/overall_reward": 1.0, "val/half/a/reward_score": 1.0}
    assert "column=id categories=101 limit=100" in caplog.text


def test_the_first_prompts_are_recorded_with_their_scores(reward_manager, tmp_path):
    engine = Engine(lambda number: [0.5] if number < 2 else [1.5])
    config = make_config()
    sampler = make_sampler(config, engine, reward_manager)
    asked = {"prompt_messages": objects([[{"role": "user", "content": "?"}]] * 2)}
    prompts = [batch.merge(asked) for batch in islice(numbered_prompts(2), 2)]
    validator = Validator(sampler, engine, prompts, config.worker, dp_size=1, num_samples=0, num_recorded=3)

    validator.sample(step=4)
    validator.measure()
    log = RolloutLog(tmp_path, 3, sampler.tokenizer, None, skip_special_tokens=True)
    log.keep(validator.recorded, 4, VALIDATION)

    rows = pq.read_table(step_files(tmp_path, VALIDATION)[4]).to_pylist()
    assert step_files(tmp_path) == {}
    assert [(row["group"], row["sample"], row["score"]) for row in rows] == [
        ("val4-0-0", 0, 0.5), ("val4-0-1", 0, 0.5), ("val4-1-0", 0, 1.5),
    ]  # fmt: skip
    assert [row["response_length"] for row in rows] == [1, 2, 3]
    assert dict(rows[0]["reward_values"])["overall"] == 0.5 and rows[0]["prompt"].startswith("prompt")
    assert len(rows[2]["rollout_log_probs"]) == 3
    assert {row["advantage"] for row in rows} == {None} == {row["old_log_probs"] for row in rows}


def test_no_responses_are_recorded_where_none_are_wanted(reward_manager):
    config = make_config()
    sampler = make_sampler(config, Engine(lambda number: [0.5]), reward_manager)
    prompts = list(islice(numbered_prompts(2), 1))
    validator = Validator(sampler, sampler.engines, prompts, config.worker, dp_size=1, num_samples=1)

    validator.sample(step=4)
    validator.measure()

    assert validator.recorded is None


def test_the_score_of_a_validation_counts_the_overlong_penalty_as_training_does(reward_manager):
    # Responses of 1 to 4 of 6 tokens; the buffer begins at 2, so the last two lose 0.8 / 4 and 2 * 0.8 / 4.
    engine = Engine(lambda number: [0.5])
    config = make_config(reward={"overlong_buffer_length": 4, "overlong_penalty_factor": 0.8})
    prompts = list(islice(numbered_prompts(2), 2))
    validator = Validator(
        make_sampler(config, engine, reward_manager), engine, prompts, config.worker, dp_size=1, num_samples=4
    )

    validator.sample(step=4)
    metrics = validator.measure()

    assert metrics["val/overall_reward"] == 0.5
    assert metrics["val/overlong_reward"] == 0.5
    assert metrics["val/overlong_penalty_reward"] == pytest.approx(-0.15)  # (0.2 + 0.4) / 4
    assert metrics["val/reward_score"] == pytest.approx(0.35)
    assert sorted(sample.score for sample in validator.samples) == pytest.approx([0.1, 0.3, 0.5, 0.5])


@pytest.fixture
def unscored(reward_manager):
    """A validator of responses that the reward function scored with nan."""
    config = make_config()
    sampler = make_sampler(config, Engine(lambda number: [0.5]), reward_manager)
    sampler.engines.awake = lambda version, timer: nullcontext()
    prompts = list(islice(numbered_prompts(2), 1))
    validator = Validator(sampler, sampler.engines, prompts, config.worker, dp_size=1, num_samples=0)
    sample = validator.sample

    def sample_without_scores(step):
        sample(step)
        [(sequences, _)] = validator._sampled
        validator._sampled = [(sequences, Scoring(lambda: {"overall": [math.nan, math.nan]}))]

    validator.sample = sample_without_scores
    return validator


def test_training_continues_with_a_warning_after_a_validation_without_any_score(unscored, caplog):
    def refuse(score):
        raise AssertionError(f"there is no score to record, got {score}")

    trainer = SimpleNamespace(
        validator=SimpleNamespace(
            loader=[], sample=unscored.sample, measure=unscored.measure, samples=[], recorded=None
        ),
        sampling=SimpleNamespace(current=unscored.sampler.engines.awake),
        run_state=SimpleNamespace(step=3, record_score=refuse),
        tracker=SimpleNamespace(log_generations=lambda samples, step: None),
    )

    metrics = RayPPOTrainer.validate(trainer, StageTimer())

    assert "val/reward_score" not in metrics and "val_response_length/mean" in metrics
    assert f"{NO_SCORE}; training continues" in caplog.text


@pytest.mark.parametrize("correct_key", [None, "accuracy"])
def test_an_evaluation_without_any_score_is_an_error(unscored, correct_key, tmp_path):
    evaluator = Evaluator(unscored, None, tmp_path, None)

    with pytest.raises(RuntimeError, match="no response has a score"):
        evaluator.evaluate("model", 0, Question(correct_key=correct_key))


@pytest.mark.parametrize(("scores", "is_told"), [([math.nan, math.nan], True), ([math.nan, 0.0], False)])
def test_a_step_in_which_no_response_has_a_score_is_told(monkeypatch, caplog, scores, is_told):
    monkeypatch.setattr(ray_trainer, "score", lambda batch, values, *options: (batch, {}))
    config = SimpleNamespace(worker=None, algorithm=None)
    trainer = SimpleNamespace(config=config, reward_stages=[], run_state=SimpleNamespace(step=3))

    RayPPOTrainer.reward(trainer, None, Scoring(lambda: {"overall": scores}), StageTimer())

    assert (f"{NO_SCORE}; nothing was learned: step 3" in caplog.text) == is_told


def test_what_a_sampler_shows_of_a_response_is_its_sample(reward_manager):
    engine, config = Engine(lambda number: [number]), make_config()
    sampler = make_sampler(config, engine, reward_manager)
    sampler.shown_columns = ("uid",)
    sampler.shown_response = lambda sequences, row: f"shown {sequences.non_tensor_batch['uid'][row]}"
    prompts = list(islice(numbered_prompts(2), 1))
    validator = Validator(sampler, engine, prompts, config.worker, dp_size=1, num_samples=2)

    validator.sample(step=4)
    validator.measure()

    assert [one.response for one in validator.samples] == ["shown val4-0-0", "shown val4-0-1"]
