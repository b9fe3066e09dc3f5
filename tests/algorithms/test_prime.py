# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.algorithms.estimators.prime import check_accuracies, prime_loss, process_rewards

NAN = float("nan")


def test_a_process_reward_is_the_scaled_log_ratio_of_its_token():
    # 0.5 x (-1 - -3) = 1, 0.5 x (-2 - -1) = -0.5; 0.5 x (-4 - -3) = -0.5.
    log_probs = torch.tensor([[-1.0, -2.0], [-4.0, -7.0]])
    ref_log_probs = torch.tensor([[-3.0, -1.0], [-3.0, -9.0]])

    rewards = process_rewards(log_probs, ref_log_probs, torch.tensor([[1, 1], [1, 0]]), beta=0.5)

    torch.testing.assert_close(rewards, torch.tensor([[1.0, -0.5], [-0.5, 0.0]]))


def test_the_loss_is_the_cross_entropy_of_the_summed_rewards():
    # Row 0: s = ln 3, sigmoid 3/4, right: -ln 3/4. Row 1: s = -ln 4, sigmoid 1/5, wrong: -ln 4/5.
    # Row 2: s = ln 3, half right: -(ln 3/4 + ln 1/4) / 2.
    rewards = torch.tensor([[math.log(3) - 1, 1.0], [-math.log(4), 9.0], [math.log(3), 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])

    losses, scores = prime_loss(rewards, torch.tensor([1.0, 0.0, 0.5]), mask)

    expected = [-math.log(0.75), -math.log(0.8), -(math.log(0.75) + math.log(0.25)) / 2]
    torch.testing.assert_close(losses, torch.tensor(expected))
    torch.testing.assert_close(scores, torch.tensor([math.log(3), -math.log(4), math.log(3)]))


def test_beta_enters_the_loss_once():
    # beta 0.1 x log-ratio 10 = 1, not 0.1: the loss of a wrong response is ln(1 + e).
    rewards = process_rewards(torch.tensor([[-1.0]]), torch.tensor([[-11.0]]), torch.ones(1, 1), beta=0.1)

    loss = prime_loss(rewards, torch.tensor([0.0]), torch.ones(1, 1)).per_sequence

    assert loss.item() == pytest.approx(math.log(1 + math.e))


def test_an_unchanged_model_predicts_a_probability_of_one_half():
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    rewards = process_rewards(log_probs, log_probs, torch.ones(2, 2), beta=0.05)

    losses, scores = prime_loss(rewards, torch.tensor([1.0, 0.0]), torch.ones(2, 2))

    assert scores.tolist() == [0, 0]
    torch.testing.assert_close(losses, torch.full((2,), math.log(2)))


def test_padding_does_not_matter():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    inputs = [torch.tensor([[-1.0, -2.0, NAN], [-3.0, math.inf, NAN]]), torch.full((2, 3), -2.5)]
    inputs[1][:, 2] = NAN
    inputs[0].requires_grad_()
    rewards = process_rewards(*inputs, mask, beta=2.0)
    losses, scores = prime_loss(rewards, torch.tensor([1.0, 0.0]), mask)

    losses.sum().backward()

    assert scores.tolist() == [4.0, -1.0]  # 2 x (1.5 + 0.5), 2 x -0.5
    assert rewards[mask == 0].eq(0).all()
    assert inputs[0].grad[mask == 0].eq(0).all()
    assert inputs[0].grad.isfinite().all()


def test_a_sequence_without_a_response_token_has_no_loss():
    rewards = torch.tensor([[NAN, 3.0], [1.0, 1.0]])

    losses, scores = prime_loss(rewards, torch.tensor([1.0, 1.0]), torch.tensor([[0, 0], [1, 1]]))

    assert scores.tolist() == [0, 2]
    assert losses[0] == 0
    assert losses[1] > 0


def test_the_gradient_equals_that_of_the_formula_in_float64():
    generator = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(4, 5, generator=generator)
    ref_log_probs = -3 * torch.rand(4, 5, generator=generator)
    lengths, accuracies, beta = [5, 2, 0, 3], torch.tensor([1.0, 0.0, 1.0, 0.25]), 0.7
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    found, wanted = log_probs.clone().requires_grad_(), log_probs.double().requires_grad_()

    prime_loss(
        process_rewards(found, ref_log_probs, mask, beta), accuracies, mask
    ).per_sequence.sum().backward()
    for row, length in enumerate(lengths):
        if length:
            ratio = (wanted[row, :length] - ref_log_probs[row, :length].double()).exp().prod()  # pi / pi_ref
            right = ratio**beta / (1 + ratio**beta)
            target = accuracies[row].double()
            (-target * right.log() - (1 - target) * (1 - right).log()).backward()

    torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-5, atol=1e-7)


def test_large_scores_stay_finite():
    rewards = torch.tensor([[300.0], [-300.0]], requires_grad=True)

    losses = prime_loss(rewards, torch.tensor([0.0, 1.0]), torch.ones(2, 1)).per_sequence
    losses.sum().backward()

    assert losses.tolist() == [300.0, 300.0]
    assert rewards.grad.flatten().tolist() == [1.0, -1.0]


def test_tensors_that_would_broadcast_are_rejected():
    with pytest.raises(ValueError, match=r"ref_log_probs \(2, 1\)"):
        process_rewards(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3), beta=1.0)
    with pytest.raises(ValueError, match=r"accuracies \(2, 1\)"):
        prime_loss(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3))


@pytest.mark.parametrize("wrong", [-0.5, 1.5, NAN])
def test_an_accuracy_outside_of_zero_and_one_is_an_error_that_names_its_key(wrong):
    check_accuracies(torch.tensor([0.0, 0.5, 1.0]), "accuracy")

    with pytest.raises(ValueError, match=r"`algorithm.prime_accuracy_key` \(points\) .* in 1 of 2 responses"):
        check_accuracies(torch.tensor([1.0, wrong]), "points")
