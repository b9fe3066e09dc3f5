# SPDX-License-Identifier: Apache-2.0
"""Estimators with an advantage per token."""

import math

import pytest
import torch

from tests.algorithms.advantage_batches import make_inputs
from verl.algorithms.estimators.prime import prime
from verl.algorithms.estimators.tokens import (
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
    tir_optimal_token_baseline,
)

NAN = math.nan
Z = 0.5**0.5  # what whitening makes of the larger one of two numbers
HALF = math.log(0.5)


def assert_result(found, advantages, returns):
    torch.testing.assert_close(found.advantages, torch.tensor(advantages), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.returns, torch.tensor(returns), atol=1e-6, rtol=1e-5)


def test_gae_is_the_discounted_sum_of_residuals():
    # Last token: delta 4 - 2 = 2. First: delta 0 + 0.5 * 2 - 1 = 0, A = 0 + 0.25 * 2 = 0.5. Returns A + V.
    # Whitened: 0.5 and 2 become -Z and Z.
    inputs = make_inputs([[0, 4.0]], [[1, 1]], [0], values=[[1.0, 2.0]], gamma=0.5, lam=0.5)

    assert_result(gae(inputs), [[-Z, Z]], [[1.5, 4.0]])


def test_gae_skips_tokens_that_the_policy_did_not_write():
    inputs = make_inputs(
        [[0, 7.0, 4.0, NAN]], [[1, 0, 1, 0]], [0], values=[[1.0, NAN, 2.0, 5.0]], gamma=0.5, lam=0.5
    )

    assert_result(gae(inputs), [[-Z, 0, Z, 0]], [[1.5, 0, 4.0, 0]])


def test_gae_returns_without_discount_are_the_sums_of_the_rewards():
    # gamma = lam = 1: returns are what is earned from here on, whatever the critic says.
    inputs = make_inputs(
        [[1.0, 2.0, 3.0], [4.0, 0, 0]],
        [[1, 1, 1], [1, 1, 0]],
        [0, 1],
        values=[[9.0, 8.0, 7.0], [6.0, 5.0, 4.0]],
    )

    torch.testing.assert_close(gae(inputs).returns, torch.tensor([[6.0, 5.0, 3.0], [4.0, 0, 0]]))


def test_reinforce_plus_plus_whitens_the_discounted_returns():
    # gamma 0.5: returns 0 + 0.5 * 4 = 2 and 4.
    inputs = make_inputs([[0, 4.0, 8.0]], [[1, 1, 0]], [0], gamma=0.5)

    assert_result(reinforce_plus_plus(inputs), [[-Z, Z, 0]], [[2.0, 4.0, 0]])


@pytest.mark.parametrize(("gamma", "first"), [(0.5, 2.0), (1.0, 5.0)])
def test_reinforce_plus_plus_carries_a_reward_over_a_tool_call(gamma, first):
    # One discount from the first to the last written token, however long the tool's output. At gamma 1 the
    # first token also earns 1 itself.
    own = 0.0 if gamma < 1 else 1.0
    inputs = make_inputs([[own, 9.0, 9.0, 4.0]], [[1, 0, 0, 1]], [0], gamma=gamma)

    torch.testing.assert_close(reinforce_plus_plus(inputs).returns, torch.tensor([[first, 0, 0, 4.0]]))


def test_remax_subtracts_the_score_of_the_greedy_response():
    # Returns (3, 2) and 3; greedy scores 2 and 5.
    inputs = make_inputs([[1.0, 2.0], [3.0, 9.0]], [[1, 1], [1, 0]], [0, 1], reward_baselines=[2.0, 5.0])

    assert_result(remax(inputs), [[1.0, 0.0], [-2.0, 0.0]], [[3.0, 2.0], [3.0, 0.0]])


def token_inputs(rewards, mask, **options):
    """Two responses whose squared score norms w are (0.5, 0.5, ...) and (1.25, 0, ...)."""
    width = len(mask[0]) - 2
    # 1 - 2 * 0.5 + 0.5 = 0.5;  1 - 2 * 0.25 + 0.75 = 1.25;  1 - 2 * 1 + 1 = 0
    log_probs = [[HALF, HALF, *[HALF] * width], [2 * HALF, 0.0, *[0.0] * width]]
    squares = [[0.5, 0.5, *[0.5] * width], [0.75, 1.0, *[1.0] * width]]
    return make_inputs(rewards, mask, [0, 0], log_probs=log_probs, sum_squared_probs=squares, **options)


def test_the_optimal_token_baseline_weights_responses_by_gradient_norm():
    # W: (0.5, 1) and (1.25, 1.25). G: (1, 1) and (0, 0). Baselines 0.5 / 1.75 = 2/7 and 1 / 2.25 = 4/9.
    inputs = token_inputs([[0, 1.0], [0, 0]], [[1, 1], [1, 1]])

    assert_result(optimal_token_baseline(inputs), [[5 / 7, 5 / 9], [-2 / 7, -4 / 9]], [[1.0, 1.0], [0, 0]])


def test_the_optimal_token_baseline_squares_the_importance_weights():
    # The second row counts four times: W (5, 5). Baselines 0.5 / 5.5 = 1/11 and 1 / 6.
    inputs = token_inputs([[0, 1.0], [0, 0]], [[1, 1], [1, 1]], importance_weights=[[1.0, 1.0], [2.0, 2.0]])

    assert_result(optimal_token_baseline(inputs), [[10 / 11, 5 / 6], [-1 / 11, -1 / 6]], [[1.0, 1.0], [0, 0]])


@pytest.mark.parametrize("estimator", [optimal_token_baseline, tir_optimal_token_baseline])
def test_the_baseline_is_zero_past_the_second_longest_response(estimator):
    # The first two positions as above; at the last two there is no other response.
    inputs = token_inputs([[0, 0, 0, 1.0], [0, 0, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]])

    torch.testing.assert_close(
        estimator(inputs).advantages, torch.tensor([[5 / 7, 5 / 9, 1.0, 1.0], [-2 / 7, -4 / 9, 0, 0]])
    )


@pytest.mark.parametrize("estimator", [optimal_token_baseline, tir_optimal_token_baseline])
def test_a_lone_response_has_no_token_baseline(estimator):
    inputs = make_inputs(
        [[1.0, 2.0]], [[1, 1]], [0], log_probs=[[HALF, HALF]], sum_squared_probs=[[0.5, 0.5]]
    )

    assert_result(estimator(inputs), [[3.0, 2.0]], [[3.0, 2.0]])


@pytest.mark.parametrize("estimator", [optimal_token_baseline, tir_optimal_token_baseline])
def test_a_token_baseline_is_finite_for_tokens_of_probability_one(estimator):
    # w is 0 where the policy was certain: no gradient to reduce the variance of, and 0 / (0 + 1e-8).
    inputs = make_inputs(
        [[1.0], [0.0]], [[1], [1]], [0, 0], log_probs=[[0.0], [0.0]], sum_squared_probs=[[1.0], [1.0]]
    )

    assert_result(estimator(inputs), [[1.0], [0.0]], [[1.0], [0.0]])


def test_the_tool_call_baseline_aligns_tokens_written_by_the_policy():
    # The first response's second token is at position 2, after tool output; it is compared with the other's
    # second token at position 1. By position each is alone: the baseline is G.
    inputs = token_inputs([[0, 5.0, 1.0], [0, 0, 0]], [[1, 0, 1], [1, 1, 0]])

    by_own_tokens = tir_optimal_token_baseline(inputs).advantages
    by_position = optimal_token_baseline(inputs).advantages

    torch.testing.assert_close(by_own_tokens, torch.tensor([[5 / 7, 0, 5 / 9], [-2 / 7, -4 / 9, 0]]))
    torch.testing.assert_close(by_position, torch.tensor([[5 / 7, 0, 1.0], [-2 / 7, 0, 0]]))


def prime_inputs(**options):
    return make_inputs(
        [[NAN, 0, 0], [0, 0, 0]],
        [[1, 1, 0], [1, 1, 0]],
        [0, 0],
        process_rewards=[[1.0, 1.0, NAN], [0, 0, 9.0]],
        accuracies=[1.0, 0.0],
        **options,
    )


def test_prime_adds_process_rewards_and_accuracy_with_leave_one_out_baselines():
    # Means 1 and 0, n = 2: process 2 * q - 1 = 1 and -1 at every token; accuracy 2 * a - 1 = 1 and -1 at the
    # last one. Tokens (1, 2) and (-1, -2), returns (3, 2) and (-3, -2): mean 0, variance 26 / 3.
    inputs = prime_inputs(process_coef=1.0, accuracy_coef=1.0, normalize_process_rewards=False)

    std = (26 / 3) ** 0.5
    assert_result(
        prime(inputs),
        [[3 / std, 2 / std, 0], [-3 / std, -2 / std, 0]],
        [[3.0, 2.0, 0], [-3.0, -2.0, 0]],
    )


def test_prime_scales_the_process_rewards_by_their_largest_return():
    # The largest is 1 + 1 = 2: process rewards 0.5, mean 0.5, 2 * 0.5 - 0.5 = 0.5. With coefficients 4 and 2
    # the tokens are (2, 2 + 2), the returns (6, 4).
    inputs = prime_inputs(process_coef=4.0, accuracy_coef=2.0)

    torch.testing.assert_close(
        prime(inputs).returns, torch.tensor([[6.0, 4.0, 0], [-6.0, -4.0, 0]]), atol=1e-5, rtol=1e-5
    )


def test_prime_keeps_the_rewards_of_a_lone_response():
    # Returns: 1 * (q + q) + 2 * a and 1 * q + 2 * a, with q 0.5 and a 1.
    inputs = make_inputs(
        [[0, 0]],
        [[1, 1]],
        [0],
        process_rewards=[[0.5, 0.5]],
        accuracies=[1.0],
        process_coef=1.0,
        accuracy_coef=2.0,
        normalize_process_rewards=False,
    )

    assert_result(prime(inputs), [[Z, -Z]], [[3.0, 2.5]])
