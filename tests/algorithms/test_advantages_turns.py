# SPDX-License-Identifier: Apache-2.0
"""Estimators with an advantage per turn of a conversation."""

import math
from dataclasses import replace

import pytest
import torch

from tests.algorithms.advantage_batches import make_inputs, random_inputs
from verl.algorithms.advantages import grpo
from verl.algorithms.estimators.tokens import gae
from verl.algorithms.estimators.turns import turn_gae, turn_grpo

NAN = math.nan
Z = 0.5**0.5  # the z-score of the larger one of two numbers


def assert_result(found, advantages, returns):
    torch.testing.assert_close(found.advantages, torch.tensor(advantages), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.returns, torch.tensor(returns), atol=1e-5, rtol=1e-5)


def turn_inputs(rewards, mask, group_ids, turn_ids, **options):
    return make_inputs(rewards, mask, group_ids, turn_ids=torch.tensor(turn_ids), **options)


def test_a_turn_is_compared_with_the_turns_of_its_number():
    # Row 0: two turns, tokens 0-1 and 3 (token 2 is an observation), rewards 1 and 4; row 1: rewards 0 and 2.
    # turn_gamma 0.5: G[0] = (1 + 0.5 * 4, 4) = (3, 4), G[1] = (0 + 0.5 * 2, 2) = (1, 2).
    rewards = [[0.25, 0.75, NAN, 4.0], [0.0, NAN, 2.0, 0.0]]
    mask, ids = [[1, 1, 0, 1], [1, 0, 1, 1]], [[0, 0, 9, 1], [0, -1, 1, 1]]

    inputs = turn_inputs(rewards, mask, [0, 0], ids, turn_gamma=0.5, norm_adv_by_std=False)

    expected = [[1.0, 1.0, 0, 1.0], [-1.0, 0, -1.0, -1.0]]
    assert_result(turn_grpo(inputs), expected, expected)
    scaled = [[Z, Z, 0, Z], [-Z, 0, -Z, -Z]]
    assert_result(turn_grpo(replace(inputs, norm_adv_by_std=True)), scaled, scaled)


def test_a_turn_that_no_other_response_reached_keeps_its_return():
    # First turns: G = 1 + 5 = 6 and 2, the mean is 4. The second turn is alone: 5.
    inputs = turn_inputs(
        [[1.0, 5.0], [2.0, 8.0]], [[1, 1], [1, 0]], [0, 0], [[0, 1], [0, 0]], norm_adv_by_std=False
    )

    expected = [[2.0, 5.0], [-2.0, 0.0]]
    assert_result(turn_grpo(inputs), expected, expected)


def test_a_reward_reaches_earlier_turns_and_no_later_one():
    # Rewards 3 and 0 on the first turn, none on the second: the second turns do not differ.
    inputs = turn_inputs(
        [[3.0, 0.0], [0.0, 0.0]], [[1, 1], [1, 1]], [0, 0], [[0, 1], [0, 1]], norm_adv_by_std=False
    )

    assert turn_grpo(inputs).advantages.tolist() == [[1.5, 0.0], [-1.5, 0.0]]


def test_a_turn_without_a_token_that_counts_is_neither_compared_nor_discounted():
    # The first response has no second turn: G = 1 + 0.5 * 4 = 3 and 4; the other one 0 + 0.5 * 2 = 1, 2.
    inputs = turn_inputs(
        [[1.0, 9.0, 4.0], [0.0, 9.0, 2.0]],
        [[1, 0, 1], [1, 0, 1]],
        [0, 0],
        [[0, 1, 2], [0, 1, 2]],
        turn_gamma=0.5,
        norm_adv_by_std=False,
    )

    assert turn_grpo(inputs).advantages.tolist() == [[1.0, 0.0, 1.0], [-1.0, 0.0, -1.0]]


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_turn_grpo_of_one_turn_is_grpo_bit_for_bit(seed, divide):
    inputs = random_inputs(seed, norm_adv_by_std=divide)
    one = replace(inputs, turn_ids=torch.zeros_like(inputs.turn_ids), turn_gamma=0.3)

    torch.testing.assert_close(turn_grpo(one), grpo(inputs), atol=0, rtol=0)


def test_turn_grpo_of_equally_long_conversations_with_one_reward_at_the_end_is_grpo():
    rewards = torch.zeros(12, 9)
    rewards[:, -1] = torch.randn(12, generator=torch.Generator().manual_seed(0))
    mask, ids = [[1] * 9] * 12, [[0, 0, 1, 1, 1, 2, 3, 3, 3]] * 12
    inputs = turn_inputs(rewards.tolist(), mask, [0, 1, 2] * 4, ids)

    torch.testing.assert_close(turn_grpo(inputs), grpo(inputs), atol=0, rtol=0)


def test_turn_gae_is_the_recursion_over_turns():
    # Turns: tokens 0-1 (r = 1, V = 2) and 3-4 (r = 4, V = 1); values at other tokens are not read.
    # A_1 = 4 - 1 = 3; delta_0 = 1 + 0.5 * 1 - 2 = -0.5, A_0 = -0.5 + 0.25 * 3 = 0.25. Returns 2.25 and 4.
    # Two tokens each: the mean is 1.625, the unbiased variance 4 * 1.375**2 / 3, 1.375 deviations 0.8660.
    inputs = turn_inputs(
        [[1.0, 0.0, NAN, 0.0, 4.0]],
        [[1, 1, 0, 1, 1]],
        [0],
        [[0, 0, 5, 1, 1]],
        values=[[2.0, 70.0, NAN, 1.0, 80.0]],
        turn_gamma=0.5,
        lam=0.5,
    )

    high = 0.75**0.5
    assert_result(turn_gae(inputs), [[-high, -high, 0, high, high]], [[2.25, 2.25, 0, 4.0, 4.0]])


@pytest.mark.parametrize("seed", range(3))
def test_turn_gae_of_turns_of_one_token_is_gae(seed):
    inputs = random_inputs(seed, gamma=0.9, turn_gamma=0.9, lam=0.8)
    every_token = torch.arange(inputs.turn_ids.shape[1]).expand_as(inputs.turn_ids)

    found = turn_gae(replace(inputs, turn_ids=every_token))

    torch.testing.assert_close(found, gae(inputs), atol=0, rtol=0)


def test_turn_gae_without_discount_learns_what_the_conversation_earns_from_a_turn_on():
    inputs = random_inputs(turn_gamma=1.0, lam=1.0)
    returns = turn_gae(inputs).returns
    kept = inputs.response_mask.bool()

    for row in range(len(kept)):
        for number in inputs.turn_ids[row][kept[row]].unique().tolist():
            later = kept[row] & (inputs.turn_ids[row] >= number)
            of_turn = kept[row] & (inputs.turn_ids[row] == number)
            earned = inputs.token_level_rewards[row][later].sum()
            torch.testing.assert_close(returns[row][of_turn], earned.expand(int(of_turn.sum())))
