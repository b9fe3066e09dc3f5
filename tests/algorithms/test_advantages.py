# SPDX-License-Identifier: Apache-2.0
"""Estimators with one advantage per response."""

import math

import pytest
import torch

from tests.algorithms.advantage_batches import make_inputs
from verl.algorithms.advantages import (
    ADV_ESTIMATORS,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
    sppo,
)

Z = 0.5**0.5  # z-score of the better of two different returns: (3 - 2) / sqrt(2)


def assert_advantages(found, expected):
    """Advantages and returns, which are the same without a value function."""
    torch.testing.assert_close(found.advantages, torch.tensor(expected), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.returns, found.advantages)


def test_grpo_is_the_z_score_of_the_return_in_its_group():
    # Group 0 earns {1, 3}: mean 2, unbiased std sqrt(2). Group 1 earns the same twice.
    inputs = make_inputs(
        [[0, 1.0], [0, 3.0], [5, 0.0], [5, 0.0]], [[1, 1], [1, 1], [1, 0], [1, 0]], [0, 0, 1, 1]
    )

    assert_advantages(grpo(inputs), [[-Z, -Z], [Z, Z], [0, 0], [0, 0]])


def test_grpo_without_normalization_subtracts_the_group_mean():
    # Means: (1 + 3 + 8) / 3 = 4 and (0 + 1) / 2 = 0.5.
    inputs = make_inputs(
        [[1.0], [3.0], [8.0], [0.0], [1.0]], [[1]] * 5, [0, 0, 0, 1, 1], norm_adv_by_std=False
    )

    assert_advantages(grpo(inputs), [[-3.0], [-1.0], [4.0], [-0.5], [0.5]])


def test_grpo_groups_need_not_be_contiguous():
    together = make_inputs([[1.0], [3.0], [5.0], [9.0]], [[1]] * 4, [0, 0, 1, 1])
    apart = make_inputs([[9.0], [1.0], [5.0], [3.0]], [[1]] * 4, [0, 1, 0, 1])

    torch.testing.assert_close(grpo(apart).advantages, grpo(together).advantages[[3, 0, 2, 1]])


def test_grpo_ignores_the_position_of_the_reward():
    mask = [[1, 1, 1], [1, 1, 0]]
    at_the_end = make_inputs([[0, 0, 4.0], [0, 1.0, 0]], mask, [0, 0])
    spread = make_inputs([[1.0, 2.0, 1.0], [1.0, 0, 0]], mask, [0, 0])

    torch.testing.assert_close(grpo(at_the_end).advantages, grpo(spread).advantages)


def test_grpo_is_zero_for_a_group_with_equal_returns():
    # Float32 sums of 0.9 differ from 5 x 0.9; a rounding error over a rounding error would be an advantage.
    inputs = make_inputs([[0.9]] * 5 + [[0.1]] * 7, [[1]] * 12, [0] * 5 + [1] * 7)

    assert grpo(inputs).advantages.abs().max() < 1e-6


@pytest.mark.parametrize("norm_adv_by_std", [True, False])
def test_grpo_keeps_the_return_of_a_lone_response(norm_adv_by_std):
    inputs = make_inputs(
        [[1.0, 2.0], [4.0, 0], [4.0, 0]],
        [[1, 1], [1, 0], [1, 0]],
        [0, 1, 1],
        norm_adv_by_std=norm_adv_by_std,
    )

    assert_advantages(grpo(inputs), [[3.0, 3.0], [0, 0], [0, 0]])


def test_responses_without_tokens_do_not_count_as_peers():
    # Group 0: one response of three has tokens. Group 1: the empty row's reward of 100 is in no mean.
    inputs = make_inputs(
        [[7.0], [1.0], [2.0], [0.0], [2.0], [100.0]], [[0], [1], [0], [1], [1], [0]], [0, 0, 0, 1, 1, 1]
    )

    assert_advantages(grpo(inputs), [[0], [1.0], [0], [-Z], [Z], [0]])
    assert_advantages(rloo(inputs), [[0], [1.0], [0], [-2.0], [2.0], [0]])
    assert_advantages(opo(inputs), [[0], [1.0], [0], [-1.0], [1.0], [0]])


def test_grpo_passk_rewards_the_lead_of_the_best_over_the_second_best():
    # {1, 4, 2}: lead 2, mean 7/3, variance (16/9 + 25/9 + 1/9) / 2 = 7/3. {5, 5, 0}: two share the best.
    rewards = [[1.0, 0], [2.0, 2.0], [2.0, 0], [5.0, 0], [5.0, 0], [0, 0]]
    mask = [[1, 0], [1, 1], [1, 0], [1, 1], [1, 1], [1, 1]]
    ids = [0, 0, 0, 1, 1, 1]

    lead = 2 / (7 / 3) ** 0.5

    divided = grpo_passk(make_inputs(rewards, mask, ids))
    plain = grpo_passk(make_inputs(rewards, mask, ids, norm_adv_by_std=False))
    assert_advantages(divided, [[0, 0], [lead, lead], [0, 0], [0, 0], [0, 0], [0, 0]])
    assert_advantages(plain, [[0, 0], [2.0, 2.0], [0, 0], [0, 0], [0, 0], [0, 0]])


def test_grpo_passk_is_zero_if_only_one_response_has_tokens():
    inputs = make_inputs([[3.0], [9.0]], [[1], [0]], [0, 0])

    assert_advantages(grpo_passk(inputs), [[0.0], [0.0]])


def test_grpo_passk_rejects_a_prompt_with_one_response():
    inputs = make_inputs([[1.0], [2.0], [3.0]], [[1]] * 3, [0, 0, 1])

    with pytest.raises(ValueError, match=r"`worker.rollout.n` to 2 or more"):
        grpo_passk(inputs)


def test_rloo_subtracts_the_mean_of_the_other_responses():
    # {1, 3, 8}: the others' means are 5.5, 4.5 and 2. The last prompt has one response, which earns 7.
    inputs = make_inputs(
        [[1.0, 0], [0, 3.0], [4.0, 4.0], [7.0, 0]], [[1, 0], [1, 1], [1, 1], [1, 0]], [0, 0, 0, 1]
    )

    assert_advantages(rloo(inputs), [[-4.5, 0], [-1.5, -1.5], [6.0, 6.0], [7.0, 0]])


def test_opo_weights_responses_by_length():
    # Baseline: (1 * 1 + 3 * 4) / (1 + 3) = 3.25. The last prompt has one response, which earns 7.
    inputs = make_inputs(
        [[1.0, 0, 0], [0, 0, 4.0], [7.0, 0, 0]], [[1, 0, 0], [1, 1, 1], [1, 1, 0]], [0, 0, 1]
    )

    assert_advantages(opo(inputs), [[-2.25, 0, 0], [0.75, 0.75, 0.75], [7.0, 7.0, 0]])


def test_gpg_scales_up_when_few_responses_earn_a_reward():
    # Four responses, one of them earns: factor 4 on distances of -0.5 and 0.5.
    inputs = make_inputs([[0, 0], [0, 1.0], [0, 0], [0, 0]], [[1, 0], [1, 1], [1, 1], [1, 0]], [0, 0, 1, 1])

    assert_advantages(gpg(inputs), [[-2.0, 0], [2.0, 2.0], [0, 0], [0, 0]])


def test_gpg_of_a_batch_without_rewards_is_zero():
    assert_advantages(gpg(make_inputs([[0.0], [0.0]], [[1], [1]], [0, 0])), [[0.0], [0.0]])


def test_reinforce_plus_plus_baseline_whitens_over_all_tokens():
    # Distances -1 at one token and 1 at three: mean 0.5, variance (2.25 + 3 * 0.25) / 3 = 1.
    inputs = make_inputs([[0, 0, 0], [0, 0, 2.0]], [[1, 0, 0], [1, 1, 1]], [0, 0])

    assert_advantages(reinforce_plus_plus_baseline(inputs), [[-1.5, 0, 0], [0.5, 0.5, 0.5]])


def test_gdpo_normalizes_each_component_before_the_sum():
    # z-scores -Z, Z and Z, -Z; with weights 1 and 0.5 the sums are -Z/2 and Z/2 at one token each: variance
    # 2 * Z**2 / 4 = 1/4. The rewards of the tokens do not count.
    inputs = make_inputs(
        [[3.0, 0], [9.0, 0]],
        [[1, 0], [1, 0]],
        [0, 0],
        reward_components=[[0.0, 10.0], [1.0, 0.0]],
        reward_weights=[1.0, 0.5],
    )

    assert_advantages(gdpo(inputs), [[-Z, 0], [Z, 0]])


def test_gdpo_weights_components_equally_by_default():
    # (-Z + Z) and (Z - Z): the components cancel.
    inputs = make_inputs([[0.0], [0.0]], [[1], [1]], [0, 0], reward_components=[[3.0, 2.0], [4.0, 1.0]])

    assert_advantages(gdpo(inputs), [[0.0], [0.0]])


@pytest.mark.parametrize(
    ("components", "weights"),
    [(torch.zeros(3, 2), None), (torch.zeros(2, 2), torch.ones(1)), (torch.zeros(2, 1), torch.ones(2))],
)
def test_gdpo_rejects_components_that_would_broadcast(components, weights):
    inputs = make_inputs(
        [[0.0], [0.0]], [[1], [1]], [0, 0], reward_components=components, reward_weights=weights
    )

    with pytest.raises(ValueError, match="tensors must share one shape"):
        gdpo(inputs)


def test_sppo_subtracts_the_soft_mean_of_the_batch():
    # beta 1: log((exp(0) + exp(log 3)) / 2) = log 2, over all prompts together.
    inputs = make_inputs([[0, 0.0], [math.log(3), 0]], [[1, 1], [1, 0]], [0, 1])

    low, high = -math.log(2), math.log(1.5)
    assert_advantages(sppo(inputs), [[low, low], [high, 0]])


def test_sppo_of_large_scores_does_not_overflow():
    # exp(2000) has no float; the soft mean of {1000, 0} at beta 2 is 1000 - log(2) / 2.
    inputs = make_inputs([[1000.0], [0.0]], [[1], [1]], [0, 0], softmean_beta=2.0)

    half = math.log(2) / 2
    assert_advantages(sppo(inputs), [[half], [half - 1000]])


@pytest.mark.parametrize("beta", [0.0, -1.0])
def test_sppo_rejects_a_beta_that_is_not_positive(beta):
    with pytest.raises(ValueError, match=r"`algorithm.sppo_beta` must be above 0"):
        sppo(make_inputs([[1.0]], [[1]], [0], softmean_beta=beta))


def test_an_unknown_estimator_is_an_error_that_names_the_option():
    with pytest.raises(ValueError, match=r"`algorithm.adv_estimator` must be one of .*grpo"):
        ADV_ESTIMATORS["gpro"]
