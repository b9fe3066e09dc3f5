# SPDX-License-Identifier: Apache-2.0
"""From the reward function's values to scores on tokens."""

import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.rollouts.sampling import make_config
from verl.protocol import DataProto
from verl.trainer.rollouts import scores
from verl.trainer.rollouts.scores import Scoring, column_of, join_values, on_last_tokens

MASK = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 1, 0, 0]])  # 2, 5 and 2 tokens
BATCH = DataProto.from_dict({"response_mask": MASK, "loss_mask": MASK})
VALUES = {"overall": [1.0, -1.0, 0.5], "accuracy": [1.0, 0.0, 0.5], "format": [0.0, 1.0, 1.0]}


def score(values, config, batch=BATCH, model_scores=None):
    if model_scores is not None:
        batch = batch.merge({"reward_model_scores": model_scores})
    return scores.score(batch, values, config.worker, config.algorithm)


def test_a_score_is_on_the_last_token_that_the_policy_wrote():
    scored, metrics = score(VALUES, make_config())

    expected = torch.zeros(3, 6)
    expected[0, 1], expected[1, 4], expected[2, 3] = (
        1.0,
        -1.0,
        0.5,
    )  # the third row has a tool's tokens inside
    assert scored.keys() == ["response_mask", "loss_mask", "token_level_scores", "reward_values"]
    torch.testing.assert_close(scored.batch["token_level_scores"], expected)
    # Sums over the three rows: 0.5, 1.5 and 2.
    assert metrics == pytest.approx(
        {
            "reward/overall": 1 / 6,
            "reward/accuracy": 0.5,
            "reward/format": 2 / 3,
            "reward/failures": 0.0,
            "reward/retries": 0.0,
        }
    )


def test_a_response_without_a_token_of_the_policy_has_no_score():
    scores = on_last_tokens(torch.tensor([2.0, 3.0]), torch.tensor([[0, 0], [1, 0]]))

    assert scores.tolist() == [[0.0, 0.0], [3.0, 0.0]]


def test_the_overlong_penalty_is_part_of_the_score_and_logged_separately():
    config = make_config(reward={"overlong_buffer_length": 2, "overlong_penalty_factor": 0.5})

    scored, metrics = score(VALUES, config)

    # 6 tokens at most, buffer from 4: five tokens are half into it, -0.5 * 0.5.
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [1.0, -1.25, 0.5]
    assert metrics["reward/overlong"] == pytest.approx(1 / 3)
    assert metrics["reward/overlong_penalty"] == pytest.approx(-0.25 / 3)
    assert metrics["reward/overall"] == pytest.approx(1 / 6)


def test_a_reward_models_score_is_added_with_its_weight():
    config = make_config()
    reward_model = replace(config.worker.reward_model, coef=0.5)
    config = replace(config, worker=replace(config.worker, reward_model=reward_model))

    scored, metrics = score(VALUES, config, model_scores=torch.tensor([2.0, 4.0, -3.0]))

    # 1 + 0.5 * 2, -1 + 0.5 * 4, 0.5 - 0.5 * 3; the metric is (2 + 4 - 3) / 3.
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [2.0, 1.0, -1.0]
    assert metrics["reward/reward_model"] == 1.0


def test_a_term_that_the_reward_function_also_returns_is_refused():
    config = make_config(reward={"overlong_buffer_length": 2})

    with pytest.raises(ValueError, match=r"returns \['overlong'\].*overlong_buffer_length=0"):
        score(VALUES | {"overlong": [0.0] * 3}, config)


@pytest.mark.parametrize(
    ("algorithm", "columns"),
    [
        ({"adv_estimator": "gdpo", "gdpo_reward_keys": ["format", "overall"]}, ["format", "overall"]),
        ({"adv_estimator": "prime", "prime_accuracy_key": "accuracy"}, ["accuracy"]),
    ],
)
def test_estimators_that_read_single_values_get_them_as_columns_in_the_order_of_their_keys(
    algorithm, columns
):
    scored, _ = score(VALUES, make_config(algorithm=algorithm))

    components = scored.batch["reward_components"]
    assert components.dtype == torch.float32
    assert components.T.tolist() == [VALUES[key] for key in columns]


def test_a_component_that_the_function_does_not_return_is_an_error_with_those_it_does():
    config = make_config(algorithm={"adv_estimator": "gdpo", "gdpo_reward_keys": ["style"]})

    message = r"gdpo_reward_keys` must name .* got 'style': it returns \['accuracy', 'format', 'overall'\]"
    with pytest.raises(ValueError, match=message):
        score(VALUES, config)


def test_a_value_that_is_needed_must_be_there_for_every_response():
    with pytest.raises(ValueError, match=r"`some.option` names 'a'.* missing for 1 of 2"):
        column_of({"overall": [1.0, 1.0], "a": [1.0, math.nan]}, "a", "some.option")


def test_a_value_that_no_response_of_the_step_has_is_not_logged():
    _, metrics = score(VALUES | {"rare": [math.nan] * 3}, make_config())

    assert "reward/rare" not in metrics and "reward/format" in metrics


def test_parts_with_different_values_are_joined_row_by_row():
    joined = join_values([{"overall": [1.0, 2.0], "a": [5.0, 6.0]}, {"overall": [3.0], "b": [7.0]}])

    assert joined["overall"] == [1.0, 2.0, 3.0]
    assert joined["a"][:2] == [5.0, 6.0] and math.isnan(joined["a"][2])
    assert joined["b"][2] == 7.0 and all(map(math.isnan, joined["b"][:2]))


def test_scores_follow_their_sequences_when_these_are_reordered_twice():
    scoring = Scoring.concat([Scoring(lambda: {"overall": [0.0, 1.0]}), Scoring(lambda: {"overall": [2.0]})])

    once = scoring.reorder([2, 0, 1])

    assert once.result() == {"overall": [2.0, 0.0, 1.0]}
    assert once.reorder([1, 0, 2]).result() == {"overall": [0.0, 2.0, 1.0]}


# The call for the second response failed, that for the third was repeated.
FAILED = {
    "overall": [1.0, math.nan, 0.5],
    "accuracy": [1.0, math.nan, 0.0],
    "failures": [0.0, 1.0, 0.0],
    "retries": [0.0, 1.0, 1.0],
}


def test_a_response_whose_call_failed_loses_its_mask_and_counts_in_no_mean():
    config = make_config(reward={"overlong_buffer_length": 2})
    scored, metrics = score(FAILED, config, model_scores=torch.tensor([0.0, 7.0, 0.0]))

    assert torch.equal(scored.batch["loss_mask"], MASK * torch.tensor([[1], [0], [1]]))
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [1.0, 0.0, 0.5]
    assert metrics["reward/overall"] == 0.75 and metrics["reward/accuracy"] == 0.5
    assert metrics["reward/failures"] == pytest.approx(1 / 3)
    assert metrics["reward/retries"] == pytest.approx(2 / 3)


def test_a_response_whose_call_failed_may_have_a_score_which_replaces_every_value_that_is_needed():
    values = FAILED | {"overall": [1.0, -2.0, 0.5]}
    config = make_config(algorithm={"adv_estimator": "gdpo", "gdpo_reward_keys": ["accuracy", "overall"]})

    scored, metrics = score(values, config)

    assert scored.batch["loss_mask"].equal(MASK)
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [1.0, -2.0, 0.5]
    assert scored.batch["reward_components"].tolist() == [[1.0, 1.0], [-2.0, -2.0], [0.0, 0.5]]
    assert metrics["reward/accuracy"] == 0.5 and metrics["reward/failures"] == pytest.approx(1 / 3)


def test_the_components_of_a_masked_response_are_numbers():
    config = make_config(algorithm={"adv_estimator": "prime", "prime_accuracy_key": "accuracy"})

    assert score(FAILED, config)[0].batch["reward_components"].tolist() == [[1.0], [0.0], [0.0]]


def test_the_values_of_a_masked_response_are_no_numbers_for_a_filter():
    column = column_of(FAILED, "accuracy", "algorithm.filter_key")

    assert column[[0, 2]].tolist() == [1.0, 0.0] and column[1].isnan()


def test_responses_without_a_baseline_are_masked_like_those_without_a_score():
    baselines = torch.tensor([0.5, 0.5, math.nan])
    batch = BATCH.merge({"reward_baselines": baselines})

    scored, _ = score(VALUES, make_config(), batch)

    assert torch.equal(scored.batch["loss_mask"], MASK * torch.tensor([[1], [1], [0]]))
    assert scored.batch["reward_baselines"].tolist() == [0.5, 0.5, 0.0]


def test_a_part_in_which_no_call_failed_has_no_failures():
    joined = join_values([{"overall": [1.0]}, {"overall": [2.0], "failures": [1.0], "retries": [1.0]}])

    assert joined == {"overall": [1.0, 2.0], "failures": [0.0, 1.0], "retries": [0.0, 1.0]}
