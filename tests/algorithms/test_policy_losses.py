# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs, ppo

NAN = float("nan")


def make_inputs(ratios, advantages, mask=None, **clips):
    """Inputs whose ratios are given; the new log-probs carry the gradient."""
    ratios, advantages = torch.tensor(ratios), torch.tensor(advantages)
    old = torch.full_like(ratios, -1.0)
    mask = torch.ones_like(ratios, dtype=torch.int64) if mask is None else torch.tensor(mask)
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 3.0} | clips
    return PolicyLossInputs((old + ratios.log()).requires_grad_(), old, advantages, mask, **clips)


def gradient(inputs):
    return torch.autograd.grad(ppo(inputs).per_token.sum(), inputs.log_probs)[0]


def test_ppo_by_hand():
    #   A   ratio   -A ratio   -A clip(ratio, 0.8, 1.3)   max    dual bound -3A   loss
    #   1   1.1     -1.1       -1.1                       -1.1                    -1.1
    #   1   1.5     -1.5       -1.3                       -1.3                    -1.3   clipped from above
    #   1   0.5     -0.5       -0.8                       -0.5                    -0.5   the bound is no help
    #  -2   1.5      3.0        2.6                        3.0    6.0              3.0
    #  -2   0.5      1.0        1.6                        1.6    6.0              1.6   clipped from below
    #  -2   4.0      8.0        2.6                        8.0    6.0              6.0   dual bound
    inputs = make_inputs([[1.1, 1.5, 0.5], [1.5, 0.5, 4.0]], [[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]])

    per_token, statistics = ppo(inputs)

    torch.testing.assert_close(per_token, torch.tensor([[-1.1, -1.3, -0.5], [3.0, 1.6, 6.0]]))
    assert statistics["pg_clipfrac_higher"].tolist() == [[0, 1, 0], [0, 1, 0]]
    assert statistics["pg_clipfrac_lower"].tolist() == [[0, 0, 0], [0, 0, 1]]
    torch.testing.assert_close(statistics["ppo_kl"][0, 1], torch.tensor(-math.log(1.5)))


def test_ppo_at_ratio_one_is_the_plain_policy_gradient():
    advantages = torch.tensor([[1.5, -0.5], [0.0, 2.0]])
    inputs = make_inputs([[1.0, 1.0], [1.0, 1.0]], advantages.tolist())

    torch.testing.assert_close(ppo(inputs).per_token, -advantages)
    torch.testing.assert_close(gradient(inputs), -advantages)


def test_ppo_raises_good_tokens_and_lowers_bad_ones():
    # Descent adds -gradient to the log-prob.
    grad = gradient(make_inputs([[0.9, 1.1, 0.9, 1.1]], [[1.0, 1.0, -1.0, -1.0]]))

    assert grad.sign().tolist() == [[-1, -1, 1, 1]]


def test_ppo_stops_pushing_where_a_bound_holds_and_only_there():
    #         above the upper bound   below the lower one     dual bound
    ratios = [[1.4, 1.4, 0.7, 0.7, 2.9, 3.1]]
    inputs = make_inputs(ratios, [[1.0, -1.0, 1.0, -1.0, -1.0, -1.0]])

    assert gradient(inputs).ne(0).tolist() == [[False, True, True, False, True, False]]


def test_ppo_with_wide_bounds_is_the_surrogate_without_clipping():
    ratios = [[0.01, 0.5, 3.0, 20.0]]
    advantages = [[1.0, -1.0, 1.0, -1.0]]
    inputs = make_inputs(ratios, advantages, clip_ratio_low=1.0, clip_ratio_high=99.0, clip_ratio_dual=99.0)

    torch.testing.assert_close(ppo(inputs).per_token, torch.tensor([[-0.01, 0.5, -3.0, 20.0]]))
    torch.testing.assert_close(gradient(inputs), torch.tensor([[-0.01, 0.5, -3.0, 20.0]]))


def test_ppo_has_its_own_bound_on_each_side():
    inputs = make_inputs([[1.25, 0.75]], [[1.0, -1.0]])  # bounds 0.8 and 1.3

    assert ppo(inputs).statistics["pg_clipfrac_higher"].tolist() == [[0, 1]]


def test_ppo_stays_finite_for_ratios_that_overflow():
    inputs = PolicyLossInputs(
        torch.tensor([[0.0, -500.0]], requires_grad=True),
        torch.tensor([[-500.0, 0.0]]),
        torch.tensor([[-1.0, 1.0]]),
        torch.ones(1, 2),
    )

    assert ppo(inputs).per_token.isfinite().all()
    assert gradient(inputs).isfinite().all()


def test_ppo_lets_nothing_out_of_the_padding():
    dirty = PolicyLossInputs(
        torch.tensor([[-1.0, NAN, -1.0], [-2.0, -1.0, math.inf]], requires_grad=True),
        torch.tensor([[-1.1, -1.0, NAN], [-2.0, -1.0, 0.0]]),
        torch.tensor([[1.0, 1.0, NAN], [-1.0, 2.0, 1.0]]),
        torch.tensor([[1, 0, 0], [1, 1, 0]]),
    )

    per_token, statistics = ppo(dirty)

    assert per_token.isfinite().all()
    assert all(values.isfinite().all() for values in statistics.values())
    grad = gradient(dirty)
    assert grad.isfinite().all()
    assert grad[dirty.response_mask == 0].eq(0).all()


def test_ppo_of_a_row_does_not_depend_on_its_neighbours_or_its_padding():
    whole = make_inputs([[1.1, 0.5], [2.0, 1.0]], [[1.0, -1.0], [-1.0, 1.0]], mask=[[1, 1], [1, 0]])
    alone = make_inputs([[2.0]], [[-1.0]])

    torch.testing.assert_close(ppo(whole).per_token[1, :1], ppo(alone).per_token[0])


@pytest.mark.parametrize("name", ["log_probs", "old_log_probs", "advantages", "response_mask"])
def test_ppo_rejects_tensors_that_would_broadcast(name):
    fields = {
        field: torch.zeros(3, 2) for field in ("log_probs", "old_log_probs", "advantages", "response_mask")
    }

    with pytest.raises(ValueError, match=name):
        ppo(PolicyLossInputs(**fields | {name: torch.zeros(3, 1)}))


def test_an_unknown_loss_is_an_error_that_names_the_option():
    with pytest.raises(ValueError, match=r"`worker.actor.loss_type` must be one of \['default'"):
        POLICY_LOSSES["dual_clip"]
