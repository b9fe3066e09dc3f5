# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.algorithms.kl import KL_ESTIMATORS, AdaptiveKLController, FixedKLController, kl_divergence

ONES = torch.ones(1, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [  # d = log 2 and -log 4, so the reference's share is 1/2 and 4
        ("kl", [math.log(2), -math.log(4)]),
        ("abs", [math.log(2), math.log(4)]),
        ("mse", [math.log(2) ** 2 / 2, math.log(4) ** 2 / 2]),
        ("low_var_kl", [0.5 - 1 + math.log(2), 4 - 1 - math.log(4)]),
    ],
)
def test_each_estimator_by_hand(kind, expected):
    log_probs = torch.tensor([[math.log(0.5), math.log(0.1)]])
    ref_log_probs = torch.tensor([[math.log(0.25), math.log(0.4)]])

    torch.testing.assert_close(
        kl_divergence(log_probs, ref_log_probs, ONES, kind), torch.tensor([expected]), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["kl", "low_var_kl"])
def test_the_unbiased_estimators_average_to_the_divergence(kind):
    # Expectation under the policy itself, summed over a vocabulary of three.
    policy, reference = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    divergence = (policy * (policy / reference).log()).sum()

    estimate = kl_divergence(policy.log(), reference.log(), torch.ones(1, 3), kind)

    torch.testing.assert_close((policy * estimate).sum(), divergence)


def test_the_gradient_of_mse_on_policy_is_that_of_the_divergence():
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    ref_log_probs = torch.tensor([[0.2, 0.2, 0.6]]).log()
    log_probs = logits.log_softmax(-1).unsqueeze(0)

    exact = (log_probs.exp() * (log_probs - ref_log_probs)).sum()
    sampled = (
        log_probs.exp().detach() * kl_divergence(log_probs, ref_log_probs, torch.ones(1, 3), "mse")
    ).sum()

    torch.testing.assert_close(
        torch.autograd.grad(sampled, logits, retain_graph=True)[0], torch.autograd.grad(exact, logits)[0]
    )


@pytest.mark.parametrize("kind", ["abs", "mse", "low_var_kl"])
def test_the_gradient_pulls_towards_the_reference(kind):
    log_probs = torch.tensor([[-1.0, -3.0]], requires_grad=True)  # above and below the reference

    loss = kl_divergence(log_probs, torch.tensor([[-2.0, -2.0]]), ONES, kind).sum()

    assert torch.autograd.grad(loss, log_probs)[0].sign().tolist() == [[1, -1]]


def test_low_var_kl_is_bounded_and_its_gradient_ends_at_the_bound():
    log_probs = torch.tensor([[-50.0, 0.0]], requires_grad=True)

    kl = kl_divergence(log_probs, torch.tensor([[0.0, -50.0]]), ONES, "low_var_kl")

    torch.testing.assert_close(kl, torch.tensor([[10.0, 10.0]]))
    assert torch.autograd.grad(kl.sum(), log_probs)[0].eq(0).all()


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_padding_gives_zero_without_gradient(kind):
    log_probs = torch.tensor([[-1.0, float("nan")], [-2.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]])

    kl = kl_divergence(log_probs, torch.tensor([[-2.0, 1.0], [-1.0, -1.5]]), mask, kind)

    grad = torch.autograd.grad(kl.sum(), log_probs)[0]
    assert kl[0, 1] == 0
    assert grad[0, 1] == 0
    assert kl.isfinite().all()
    assert grad.isfinite().all()


def test_shapes_that_would_broadcast_are_rejected():
    with pytest.raises(ValueError, match="ref_log_probs"):
        kl_divergence(torch.zeros(3, 2), torch.zeros(3, 1), torch.ones(3, 2), "kl")


def test_full_is_refused_by_name():
    assert "full" in KL_ESTIMATORS
    with pytest.raises(NotImplementedError, match=r"`algorithm.kl_penalty` full"):
        kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2), ONES, "full")


def test_a_fixed_controller_stays_where_it_is():
    controller = FixedKLController(0.01)
    controller.update(current_kl=9.0, n_steps=1000)
    controller.load_state_dict(AdaptiveKLController(0.5, target=0.1, horizon=100).state_dict())

    assert controller.kl_coef == 0.01


@pytest.mark.parametrize(
    ("current_kl", "expected"),
    [
        (0.11, 0.2 * (1 + 0.1 * 64 / 1000)),  # error 0.1
        (0.095, 0.2 * (1 - 0.05 * 64 / 1000)),
        (5.0, 0.2 * (1 + 0.2 * 64 / 1000)),  # clipped at 0.2
        (0.0, 0.2 * (1 - 0.2 * 64 / 1000)),
        (0.1, 0.2),
    ],
)
def test_an_adaptive_controller_moves_towards_its_target(current_kl, expected):
    controller = AdaptiveKLController(0.2, target=0.1, horizon=1000)

    controller.update(current_kl, n_steps=64)

    assert controller.kl_coef == pytest.approx(expected, rel=1e-12)


def test_an_adaptive_controller_resumes_where_it_stopped():
    unbroken, stopped = (AdaptiveKLController(0.2, target=0.1, horizon=1000) for _ in range(2))
    for controller in (unbroken, stopped):
        controller.update(0.3, n_steps=64)

    resumed = AdaptiveKLController(0.2, target=0.1, horizon=1000)
    resumed.load_state_dict(stopped.state_dict())
    for controller in (unbroken, resumed):
        controller.update(0.05, n_steps=64)

    assert resumed.kl_coef == unbroken.kl_coef
