# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.algorithms.advantages import ADV_ESTIMATORS, AdvantageInputs, grpo

Z = 0.5**0.5  # z-score of the better of two different returns: (3 - 2) / sqrt(2)


def make_inputs(rewards, mask, group_ids, **options):
    return AdvantageInputs(
        torch.tensor(rewards, dtype=torch.float32), torch.tensor(mask), torch.tensor(group_ids), **options
    )


def test_grpo_is_the_z_score_of_the_return_in_its_group():
    # Group 0 earns {1, 3}: mean 2, unbiased std sqrt(2). Group 1 earns the same twice.
    inputs = make_inputs(
        [[0, 1.0], [0, 3.0], [5, 0.0], [5, 0.0]], [[1, 1], [1, 1], [1, 0], [1, 0]], [0, 0, 1, 1]
    )

    advantages, returns = grpo(inputs)

    expected = torch.tensor([[-Z, -Z], [Z, Z], [0, 0], [0, 0]])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(returns, advantages)


def test_grpo_without_the_division_is_the_distance_from_the_mean_of_the_group():
    # Means: (1 + 3 + 8) / 3 = 4 and (0 + 1) / 2 = 0.5.
    inputs = make_inputs(
        [[1.0], [3.0], [8.0], [0.0], [1.0]], [[1]] * 5, [0, 0, 0, 1, 1], norm_adv_by_std=False
    )

    advantages, _ = grpo(inputs)

    torch.testing.assert_close(advantages, torch.tensor([[-3.0], [-1.0], [4.0], [-0.5], [0.5]]))


def test_grpo_finds_the_groups_wherever_their_rows_stand():
    together = make_inputs([[1.0], [3.0], [5.0], [9.0]], [[1]] * 4, [0, 0, 1, 1])
    apart = make_inputs([[9.0], [1.0], [5.0], [3.0]], [[1]] * 4, [0, 1, 0, 1])

    torch.testing.assert_close(grpo(apart).advantages, grpo(together).advantages[[3, 0, 2, 1]])


def test_grpo_ignores_where_in_the_response_the_reward_lies():
    mask = [[1, 1, 1], [1, 1, 0]]
    at_the_end = make_inputs([[0, 0, 4.0], [0, 1.0, 0]], mask, [0, 0])
    spread = make_inputs([[1.0, 2.0, 1.0], [1.0, 0, 0]], mask, [0, 0])

    torch.testing.assert_close(grpo(at_the_end).advantages, grpo(spread).advantages)


def test_grpo_ignores_what_stands_in_the_padding():
    clean = make_inputs([[1.0, 0, 0], [2.0, 3.0, 0]], [[1, 0, 0], [1, 1, 0]], [0, 0])
    dirty = make_inputs([[1.0, float("nan"), 7.0], [2.0, 3.0, float("inf")]], [[1, 0, 0], [1, 1, 0]], [0, 0])

    advantages = grpo(dirty).advantages

    torch.testing.assert_close(advantages, grpo(clean).advantages)
    assert advantages[0, 1:].eq(0).all()
    assert advantages[1, 2] == 0


def test_grpo_gives_nothing_to_a_group_that_earns_the_same():
    # Float32 sums of 0.9 differ from 5 x 0.9; a rounding error over a rounding error would be an advantage.
    inputs = make_inputs([[0.9]] * 5 + [[0.1]] * 7, [[1]] * 12, [0] * 5 + [1] * 7)

    assert grpo(inputs).advantages.abs().max() < 1e-6


def test_grpo_rejects_a_prompt_with_one_response():
    inputs = make_inputs([[1.0], [2.0], [3.0]], [[1]] * 3, [0, 0, 1])

    with pytest.raises(ValueError, match=r"`worker.rollout.n` to 2 or more"):
        grpo(inputs)


@pytest.mark.parametrize(
    ("rewards", "mask", "group_ids"),
    [
        (torch.zeros(4, 2), torch.ones(4, 1), torch.tensor([0, 0, 1, 1])),
        (torch.zeros(4, 2), torch.ones(1, 2), torch.tensor([0, 0, 1, 1])),
        (torch.zeros(4, 2), torch.ones(4, 2), torch.tensor([0])),
        (torch.zeros(2, 2), torch.ones(2, 2), torch.tensor([[0, 0], [0, 0]])),
    ],
)
def test_grpo_rejects_tensors_that_would_broadcast(rewards, mask, group_ids):
    with pytest.raises(ValueError, match="tensors must share one shape"):
        grpo(AdvantageInputs(rewards, mask, group_ids))


def test_an_unknown_estimator_is_an_error_that_names_the_option():
    with pytest.raises(ValueError, match=r"`algorithm.adv_estimator` must be one of .*grpo"):
        ADV_ESTIMATORS["gpro"]
