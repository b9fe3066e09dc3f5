# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    dro,
    geo_mean,
    gpg,
    kl_cov,
    ppo,
    sapo,
    weighted,
)
from verl.algorithms.token_selection import TOKEN_SELECTIONS

NAN = float("nan")


def make_inputs(ratios, advantages, mask=None, **options):
    """Inputs whose ratios are given; the new log-probs carry the gradient."""
    ratios, advantages = torch.tensor(ratios), torch.tensor(advantages)
    old = torch.full_like(ratios, -1.0)
    mask = torch.ones_like(ratios, dtype=torch.int64) if mask is None else torch.tensor(mask)
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 3.0} | options
    return PolicyLossInputs((old + ratios.log()).requires_grad_(), old, advantages, mask, **options)


def inputs_of_probabilities(probabilities, advantages, **options):
    """Inputs whose old probabilities are one half."""
    log_probs = torch.tensor(probabilities).log()
    old = torch.full_like(log_probs, 0.5).log()
    mask = torch.ones_like(log_probs)
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 3.0} | options
    return PolicyLossInputs(log_probs.requires_grad_(), old, torch.tensor(advantages), mask, **options)


def gradient(inputs, loss=ppo):
    return torch.autograd.grad(loss(inputs).per_token.sum(), inputs.log_probs)[0]


def assert_close(found, expected, atol=1e-5):
    torch.testing.assert_close(found, torch.tensor(expected), atol=atol, rtol=1e-5)


def test_ppo_by_hand():
    #   A   ratio   -A ratio   -A clip(ratio, 0.8, 1.3)   max    dual bound -3A   loss
    #   1   1.1     -1.1       -1.1                       -1.1                    -1.1
    #   1   1.5     -1.5       -1.3                       -1.3                    -1.3   clipped from above
    #   1   0.5     -0.5       -0.8                       -0.5                    -0.5   the bound is no help
    #  -2   1.5      3.0        2.6                        3.0    6.0              3.0
    #  -2   0.5      1.0        1.6                        1.6    6.0              1.6   clipped from below
    #  -2   4.0      8.0        2.6                        8.0    6.0              6.0   dual bound
    inputs = make_inputs([[1.1, 1.5, 0.5], [1.5, 0.5, 4.0]], [[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]])

    per_token, statistics, _ = ppo(inputs)

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


def test_ppo_has_no_gradient_exactly_where_a_bound_is_active():
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


def test_ppo_has_separate_bounds():
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


def test_ppo_ignores_the_padding():
    dirty = PolicyLossInputs(
        torch.tensor([[-1.0, NAN, -1.0], [-2.0, -1.0, math.inf]], requires_grad=True),
        torch.tensor([[-1.1, -1.0, NAN], [-2.0, -1.0, 0.0]]),
        torch.tensor([[1.0, 1.0, NAN], [-1.0, 2.0, 1.0]]),
        torch.tensor([[1, 0, 0], [1, 1, 0]]),
    )

    per_token, statistics, _ = ppo(dirty)

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


def test_gpg_is_the_plain_policy_gradient():
    inputs = make_inputs([[1.0, 5.0]], [[2.0, -1.0]])  # log-probs -1 and -1 + log(5)

    per_token, statistics, _ = gpg(inputs)

    assert_close(per_token, [[2.0, -1 + math.log(5)]])
    assert_close(gradient(inputs, gpg), [[-2.0, 1.0]])
    assert_close(statistics["ppo_kl"], [[0.0, -math.log(5)]])


def test_cispo_by_hand():
    # The loss is -w A log-prob, its gradient -w A also where the weight is at a bound.
    #   A   ratio   weight in [0.8, 1.3]   log-prob         gradient
    #   1   1.1     1.1                    -1 + log(1.1)    -1.1
    #   1   1.5     1.3                    -1 + log(1.5)    -1.3
    #  -2   0.5     0.8                    -1 + log(0.5)     1.6
    inputs = make_inputs([[1.1, 1.5, 0.5]], [[1.0, 1.0, -2.0]])

    per_token, statistics, _ = cispo(inputs)

    assert_close(
        per_token,
        [[-1.1 * (math.log(1.1) - 1), -1.3 * (math.log(1.5) - 1), 1.6 * (math.log(0.5) - 1)]],
    )
    assert_close(gradient(inputs, cispo), [[-1.1, -1.3, 1.6]])
    assert statistics["pg_clipfrac_higher"].tolist() == [[0, 1, 1]]


def test_sapo_by_hand():
    # sigmoid(0) = 1/2, sigmoid(log 3) = 3/4. With tau 1 and A > 0 the gate is 4 sigmoid(ratio - 1), with
    # tau 2 and A < 0 it is 2 sigmoid(2 (ratio - 1)). Its gradient is 4 s (1 - s) ratio: 1 at ratio 1.
    log3 = math.log(3)
    inputs = make_inputs(
        [[1.0, 1 + log3, 1.0, 1 + log3 / 2]], [[2.0, 2.0, -1.0, -1.0]], tau_positive=1.0, tau_negative=2.0
    )

    assert_close(sapo(inputs).per_token, [[-2 * 2.0, -2 * 3.0, 1.0, 1.5]])
    assert_close(gradient(inputs, sapo), [[-2.0, -2 * 0.75 * (1 + log3), 1.0, 0.75 * (1 + log3 / 2)]])


def test_sapo_fades_with_the_distance_from_ratio_one():
    ratios = torch.tensor([1.0, 2.0, 5.0, 50.0])
    unbounded = -ratios  # the gradient of -ratio

    share = gradient(make_inputs([ratios.tolist()], [[1.0] * 4]), sapo)[0] / unbounded

    assert (share.diff() < 0).all()
    torch.testing.assert_close(share[0], torch.tensor(1.0))
    assert share[-1] < 1e-6


def test_clip_cov_drops_selected_tokens():
    #   A   ratio   PPO without the dual bound
    #   1   1.1     -1.1
    #   1   1.1     selected: 0
    #   1   1.5     clipped: -1.3
    #  -1   4.0      4.0, although the dual bound is 3
    selected = torch.tensor([[False, True, False, False]])
    inputs = make_inputs([[1.1, 1.1, 1.5, 4.0]], [[1.0, 1.0, 1.0, -1.0]], selected=selected)

    per_token, statistics, _ = clip_cov(inputs)

    assert_close(per_token, [[-1.1, 0.0, -1.3, 4.0]])
    assert_close(gradient(inputs, clip_cov), [[-1.1, 0.0, 0.0, 4.0]])
    assert statistics["clip_cov_frac"].tolist() == [[0, 1, 0, 0]]
    assert statistics["pg_clipfrac_higher"].tolist() == [[0, 0, 1, 0]]


def test_kl_cov_penalizes_the_log_ratio_of_selected_tokens():
    # The penalty is 0.1 |log ratio|, its gradient 0.1 towards the old policy.
    e = math.e
    selected = torch.tensor([[True, False, True]])
    inputs = make_inputs([[e, e, 1 / e]], [[1.0, 1.0, -2.0]], selected=selected, ppo_kl_coef=0.1)

    per_token, statistics, _ = kl_cov(inputs)

    assert_close(per_token, [[-e + 0.1, -e, 2 / e + 0.1]])
    assert_close(gradient(inputs, kl_cov), [[-e + 0.1, -e, 2 / e - 0.1]])
    assert statistics["kl_cov_frac"].tolist() == [[1, 0, 1]]


def test_dppo_tv_by_hand():
    # The old probability is 1/2; it may rise by 0.3 (A > 0) and fall by 0.2 (A < 0). The ratio is 2 p.
    #   A    p      move    inside   weight min(2 p, 1.6)
    #   1    0.75    0.25   yes      1.5
    #   1    0.9     0.4    no
    #   1    0.1    -0.4    yes      0.2     on its way down: a good response pulls it back
    #  -1    0.35   -0.15   yes      0.7
    #  -1    0.2    -0.3    no
    #  -1    0.9     0.4    yes      1.6     cut from 1.8
    p = [0.75, 0.9, 0.1, 0.35, 0.2, 0.9]
    inputs = inputs_of_probabilities([p], [[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]], clip_ratio_dual=1.6)

    per_token, statistics, _ = dppo_tv(inputs)

    weights = [-1.5, 0.0, -0.2, 0.7, 0.0, 1.6]  # -A times the weight
    assert_close(per_token, [[w * math.log(q) for w, q in zip(weights, p, strict=True)]])
    assert_close(gradient(inputs, dppo_tv), [weights])
    assert statistics["pg_clipfrac_higher"].tolist() == [[0, 1, 0, 0, 1, 0]]
    assert statistics["pg_clipfrac_lower"].tolist() == [[0, 1, 0, 0, 0, 1]]


def test_dppo_kl_by_hand():
    # The old probability is 1/2: KL = -1/2 log(4 p (1 - p)), 0.144 at 1/4 and 3/4, 0.511 at 0.1 and 0.9.
    #   A    p      bound   inside
    #   1    0.75   0.3     yes
    #   1    0.9    0.3     no
    #   1    0.1            yes, below the old probability
    #  -1    0.25   0.2     yes
    #  -1    0.1    0.2     no
    #  -1    0.9            yes, above the old probability
    p = [0.75, 0.9, 0.1, 0.25, 0.1, 0.9]
    inputs = inputs_of_probabilities([p], [[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])

    per_token, statistics, _ = dppo_kl(inputs)

    weights = [-1.5, 0.0, -0.2, 0.5, 0.0, 1.8]  # -A times the ratio
    assert_close(per_token, [[w * math.log(q) for w, q in zip(weights, p, strict=True)]])
    assert_close(gradient(inputs, dppo_kl), [weights])
    assert statistics["pg_clipfrac_higher"].tolist() == [[0, 1, 0, 0, 1, 0]]


def test_dppo_kl_applies_both_bounds_to_the_divergence():
    # KL at 0.75 and 0.25 is 0.1438: on either side of bounds a little above and below.
    def is_clipped(bound):
        inputs = inputs_of_probabilities(
            [[0.75, 0.25]], [[1.0, -1.0]], clip_ratio_low=bound, clip_ratio_high=bound
        )
        return dppo_kl(inputs).statistics["pg_clipfrac_higher"].tolist()

    assert is_clipped(0.144) == [[0, 0]]
    assert is_clipped(0.143) == [[1, 1]]


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_dppo_is_finite_for_probabilities_of_one_and_zero(loss):
    inputs = PolicyLossInputs(
        torch.tensor([[0.0, -200.0, 0.0, -200.0]], requires_grad=True),
        torch.tensor([[0.0, 0.0, -200.0, -200.0]]),
        torch.tensor([[1.0, -1.0, 1.0, -1.0]]),
        torch.ones(1, 4),
    )

    assert loss(inputs).per_token.isfinite().all()
    assert gradient(inputs, loss).isfinite().all()


def test_dro_by_hand():
    # Log-prob -1/2, old -1, A 2, beta 1/2: -(2 (-1/2) - 1/4 (1/2)^2) = 1 + 1/16, gradient -2 + 1/2 1/2.
    inputs = make_inputs([[math.exp(0.5)]], [[2.0]], dro_beta=0.5)

    assert_close(dro(inputs).per_token, [[1.0625]])
    assert_close(gradient(inputs, dro), [[-1.75]])


def test_dro_is_minimal_at_a_log_ratio_of_advantage_over_beta():
    inputs = make_inputs([[math.exp(3.0), math.exp(-1.5)]], [[6.0, -3.0]], dro_beta=2.0)

    assert_close(gradient(inputs, dro), [[0.0, 0.0]])


def test_dro_pulls_back_tokens_that_are_far_away():
    inputs = PolicyLossInputs(
        torch.tensor([[-1.0]], requires_grad=True), torch.tensor([[-101.0]]), torch.zeros(1, 1),
        torch.ones(1, 1), dro_beta=2.0,
    )  # fmt: skip

    assert_close(gradient(inputs, dro), [[200.0]])


@pytest.mark.parametrize("beta", [None, 0.0, -1.0, NAN])
def test_dro_needs_a_positive_beta(beta):
    with pytest.raises(ValueError, match=r"needs `worker.actor.dro_beta` above zero, got"):
        dro(make_inputs([[1.0]], [[1.0]], dro_beta=beta))


def test_exactly_the_losses_with_a_selection_need_one():
    for name in POLICY_LOSSES:
        inputs = make_inputs([[1.0]], [[1.0]], dro_beta=1.0)
        if name in TOKEN_SELECTIONS:
            with pytest.raises(ValueError, match=rf"`worker.actor.loss_type` {name} needs `selected`"):
                POLICY_LOSSES[name](inputs)
        else:
            POLICY_LOSSES[name](inputs)


def test_weights_multiply_the_losses_of_tokens():
    loss = gpg(make_inputs([[1.0, 1.0, 1.0]], [[1.0, 2.0, 3.0]], mask=[[1, 1, 0]]))
    weights = torch.tensor([[0.5, 2.0, NAN]], requires_grad=True)

    found = weighted(loss, weights, torch.tensor([[1, 1, 0]]))

    assert_close(found.per_token, [[0.5, 4.0, 0.0]])
    assert torch.autograd.grad(found.per_token.sum(), weights, allow_unused=True) == (None,)
    assert found.statistics is loss.statistics


def test_a_sequence_weight_is_the_geometric_mean_of_its_token_weights():
    # Weights 1/2, 2, 8: the cube root of 8 is 2. A weight of zero makes the mean zero.
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    loss = geo_mean(make_inputs([[1.0] * 3] * 3, [[1.0] * 3] * 3, mask=mask.tolist()))
    weights = torch.tensor([[0.5, 2.0, 8.0], [0.0, 2.0, NAN], [NAN, NAN, NAN]])

    assert loss.is_sequence_level
    assert_close(weighted(loss, weights, mask).per_token, [[-2.0, -2.0, -2.0], [0.0] * 3, [0.0] * 3])


def test_no_weights_change_nothing():
    loss = gpg(make_inputs([[1.0]], [[1.0]]))

    assert weighted(loss, None, torch.ones(1, 1)) is loss


def test_weights_of_another_shape_are_rejected():
    loss = gpg(make_inputs([[1.0, 1.0]], [[1.0, 1.0]]))

    with pytest.raises(ValueError, match=r"per_token \(1, 2\), weights \(1, 1\)"):
        weighted(loss, torch.ones(1, 1), torch.ones(1, 2))


def test_an_unknown_loss_is_an_error_that_names_the_option():
    with pytest.raises(ValueError, match=r"`worker.actor.loss_type` must be one of \['cispo', 'clip_cov'"):
        POLICY_LOSSES["dual_clip"]
