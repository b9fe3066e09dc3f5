# SPDX-License-Identifier: Apache-2.0
"""Groups are kept by their scores and counted, and a step stops when it has enough."""

from dataclasses import replace

import pytest
import torch

from tests.trainer.rollouts.sampling import make_config
from verl.config.algorithm import AlgorithmConfig
from verl.trainer.rollouts import group_filter
from verl.trainer.rollouts.group_filter import (
    EqualScoresFilter,
    MeanScoreFilter,
    Quota,
    make_group_filter,
    solve_metrics,
)

# Means 0, 1, 0.5, 0.5, 0.25; groups 0, 1 and 3 have equal scores.
SCORES = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.5]], dtype=torch.float64)


def make_quota(config):
    sizes = [role.global_batch_size for role in config.trained_roles.values()]
    return group_filter.make_quota(config.data, config.trainer, sizes)


def test_online_filtering_keeps_means_strictly_between_its_bounds():
    assert MeanScoreFilter("overall", 0.25, 1.0).keep(SCORES).tolist() == [False, False, True, True, False]
    assert MeanScoreFilter("overall", 0.2, 0.5).keep(SCORES).tolist() == [False] * 4 + [True]


def test_rejection_drops_groups_of_equal_scores_for_any_scores():
    assert EqualScoresFilter("overall").keep(SCORES).tolist() == [False, False, True, False, True]
    assert EqualScoresFilter("overall").keep(torch.tensor([[-3.0, -3.0, -3.0 + 1e-6]])).tolist() == [True]


def test_online_filtering_counts_why_groups_were_left_out():
    metrics = MeanScoreFilter("overall", 0.25, 0.99).metrics(SCORES, SCORES[2:4])

    assert metrics == {"filter/too_low": 2.0, "filter/too_high": 1.0, "filter/all_equal": 3.0}


def test_rejection_counts_solved_prompts_before_and_after_it():
    metrics = EqualScoresFilter("overall").metrics(SCORES, SCORES[[2, 4]])

    before = {"solve_none": 1, "solve_all": 1, "solve_none_ratio": 0.2, "solve_all_ratio": 0.2}
    before["without_adv_ratio"] = 0.6  # groups 0, 1 and 3
    assert {name: metrics[f"batch/{name}_before_rs"] for name in before} == pytest.approx(before)
    assert {name: metrics[f"batch/{name}"] for name in before} == dict.fromkeys(before, 0.0)


def test_a_prompt_is_solved_by_none_up_to_zero_and_by_all_from_one_on():
    # Scores of -1 and 1, as DAPO's, count as those of 0 and 1.
    metrics = solve_metrics(torch.tensor([[-1.0, -1.0], [1.0, 1.0], [1.0, 1.5], [-1.0, 1.0]]))

    assert (metrics["batch/solve_none"], metrics["batch/solve_all"]) == (1.0, 2.0)
    assert metrics["batch/without_adv_ratio"] == 0.5


def test_no_group_at_all_has_shares_of_zero():
    assert set(solve_metrics(torch.zeros(0, 2)).values()) == {0.0}


@pytest.mark.parametrize(
    ("low", "high", "remedy"),
    [(0.5, 0.9, "choose easier prompts or lower"), (-1.0, 0.3, "choose harder ones or raise")],
)
def test_the_remedy_follows_from_the_more_frequent_reason(low, high, remedy):
    assert remedy in MeanScoreFilter("overall", low, high).reasons(SCORES)


def test_the_options_choose_the_filter():
    plain = AlgorithmConfig()
    filtering = AlgorithmConfig(online_filtering=True, filter_key="accuracy")

    assert make_group_filter(plain, rejection_sample=False) is None
    assert make_group_filter(filtering, rejection_sample=False) == MeanScoreFilter("accuracy", 0.01, 0.99)
    assert make_group_filter(plain, rejection_sample=True) == EqualScoresFilter("overall")


def test_online_filtering_fills_the_step_and_rejection_whole_mini_batches_of_every_trained_model():
    config = make_config(prompts=12, mini_batch=4, algorithm={"online_filtering": True})
    assert make_quota(config).multiple == 12

    config = make_config(
        prompts=12, mini_batch=4, trainer={"rejection_sample": True, "rejection_sample_multiplier": 3}
    )
    assert make_quota(config) == Quota(target=12, multiple=4, oversampling=3, max_calls=20)
    critic = replace(config.worker.critic, global_batch_size=6)
    config = replace(config, worker=replace(config.worker, critic=critic))
    assert make_quota(config).multiple == 4  # the critic is not trained
    config = replace(config, algorithm=replace(config.algorithm, adv_estimator="gae"))
    assert make_quota(config).multiple == 12  # the smallest multiple of 4 and 6


def test_a_step_uses_whole_mini_batches_and_never_more_than_its_prompts():
    quota = Quota(target=8, multiple=4)

    assert [quota.usable(kept) for kept in (3, 4, 7, 8, 11)] == [0, 4, 4, 8, 8]


def test_a_step_stops_when_it_is_full_or_has_a_mini_batch_and_sampled_what_it_wanted():
    quota = Quota(target=8, multiple=4, oversampling=2)

    assert quota.wanted(num_kept=0) == 16 and quota.wanted(num_kept=5) == 6 and quota.wanted(num_kept=9) == 0
    assert quota.has_enough(num_kept=8, num_sampled=8, wanted=16)
    assert not quota.has_enough(num_kept=7, num_sampled=8, wanted=16)
    assert quota.has_enough(num_kept=4, num_sampled=16, wanted=16)
    assert not quota.has_enough(num_kept=3, num_sampled=16, wanted=16)


def test_zero_calls_is_without_limit():
    assert not Quota(8, 4, max_calls=0).is_exhausted(1000)
    assert Quota(8, 4, max_calls=2).is_exhausted(2) and not Quota(8, 4, max_calls=2).is_exhausted(1)
    assert make_quota(make_config(trainer={"max_try_make_batch": -5})).max_calls == 0
