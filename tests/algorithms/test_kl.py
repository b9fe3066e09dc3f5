# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.algorithms.kl import EXACT, KL_ESTIMATORS, kl_divergence

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


def test_low_var_kl_is_bounded_and_has_no_gradient_beyond_the_bound():
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


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_a_plus_form_has_the_value_of_its_estimator_and_the_gradient_of_mse(kind):
    # Two rows of different lengths; d = 0.5, -1 and -2.
    log_probs = torch.tensor([[-1.0, -3.0], [-4.0, float("nan")]], requires_grad=True)
    ref_log_probs = torch.tensor([[-1.5, -2.0], [-2.0, 7.0]])
    mask = torch.tensor([[1, 1], [1, 0]])

    plus = kl_divergence(log_probs, ref_log_probs, mask, f"{kind}+")
    gradient = torch.autograd.grad(plus.sum(), log_probs)[0]

    torch.testing.assert_close(plus, kl_divergence(log_probs, ref_log_probs, mask, kind), atol=0, rtol=0)
    assert gradient.tolist() == [[0.5, -1.0], [-2.0, 0.0]]  # d (d**2 / 2) / d log_probs = d


def test_the_plus_form_of_low_var_kl_pulls_where_the_plain_form_is_clamped():
    log_probs = torch.tensor([[-50.0, 0.0]], requires_grad=True)

    kl = kl_divergence(log_probs, torch.tensor([[0.0, -50.0]]), ONES, "low_var_kl+")

    assert kl.tolist() == [[10.0, 10.0]]
    assert torch.autograd.grad(kl.sum(), log_probs)[0].tolist() == [[-50.0, 50.0]]


@pytest.mark.parametrize("kind", [name for name in KL_ESTIMATORS if name not in EXACT])
def test_every_estimator_has_the_gradient_of_its_formula_in_double_precision(kind):
    # Written with the ratio of probabilities; constants behind `detach`, where a + form has them.
    log_probs = torch.tensor([[-0.3, -2.5, -1.0], [-0.9, -0.2, -3.0]], dtype=torch.float64)
    ref_log_probs = torch.tensor([[-0.9, -1.5, -0.7], [-0.4, -0.8, -2.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    formulas = {
        "kl": lambda q, r: -(r / q).log(),
        "abs": lambda q, r: torch.maximum(q.log() - r.log(), r.log() - q.log()),
        "mse": lambda q, r: 0.5 * (r / q).log() ** 2,
        "low_var_kl": lambda q, r: r / q - (r / q).log() - 1,
    }
    leaf = log_probs.clone().requires_grad_()
    terms = formulas["mse" if kind.endswith("+") else kind](leaf.exp(), ref_log_probs.exp())
    expected = torch.autograd.grad(sum(terms[i, t] for i, t in mask.nonzero()), leaf)[0]

    ours = log_probs.float().requires_grad_()
    kl = kl_divergence(ours, ref_log_probs.float(), mask, kind)

    torch.testing.assert_close(
        torch.autograd.grad(kl.sum(), ours)[0].double(), expected, atol=1e-6, rtol=1e-5
    )


def test_full_is_the_given_divergence_on_response_tokens():
    full_kl = torch.tensor([[0.5, float("nan")], [0.25, 0.75]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]])

    kl = kl_divergence(torch.zeros(2, 2), None, mask, "full", full_kl)

    assert kl.tolist() == [[0.5, 0.0], [0.25, 0.75]]
    assert torch.autograd.grad(kl.sum(), full_kl)[0].tolist() == [[1.0, 0.0], [1.0, 1.0]]


def test_full_without_the_divergence_over_the_vocabulary_is_rejected():
    with pytest.raises(ValueError, match=r"`algorithm.kl_penalty` full needs the KL over the vocabulary"):
        kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2), ONES, "full")


def test_an_estimator_without_reference_log_probs_is_rejected():
    with pytest.raises(ValueError, match=r"kl needs `ref_log_probs`"):
        kl_divergence(torch.zeros(1, 2), None, ONES, "kl", torch.zeros(1, 2))


def test_a_full_divergence_that_would_broadcast_is_rejected():
    with pytest.raises(ValueError, match=r"full_kl \(1, 1\)"):
        kl_divergence(torch.zeros(1, 2), None, ONES, "full", torch.zeros(1, 1))


def test_an_unknown_estimator_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"abs\+.*'full'.*'low_var_kl\+'.*got 'k3'"):
        kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2), ONES, "k3")
