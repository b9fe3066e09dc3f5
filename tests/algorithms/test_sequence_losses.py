# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.algorithms.aggregation import AGGREGATIONS, aggregate_loss, count_denominators
from verl.algorithms.policy_losses import PolicyLossInputs, geo_mean, gspo, gspo_token, sppo

MASK = [[1, 1, 1], [1, 1, 0]]


def make_inputs(log_ratios, advantages, mask, **options):
    """Inputs whose log-ratios are given; the new log-probs carry the gradient."""
    log_ratios = torch.tensor(log_ratios)
    old = torch.full_like(log_ratios, -1.0)
    return PolicyLossInputs(
        (old + log_ratios).requires_grad_(), old, torch.tensor(advantages), torch.tensor(mask), **options
    )


def gradient(inputs, loss):
    return torch.autograd.grad(loss(inputs).per_token.sum(), inputs.log_probs)[0]


def assert_close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_gspo_by_hand(loss):
    # Mean log-ratios 0.1 and -0.1: ratios 1.105 and 0.905, bounds 0.95 and 1.05.
    #   A = 1:  min(1.105, 1.05) = 1.05, clipped;   0.905
    #   A = -1: 1.105;                              max(0.905, 0.95) = 0.95, clipped
    high, low = math.exp(0.1), math.exp(-0.1)
    log_ratios = [[0.2, 0.0, 0.1], [-0.3, 0.1, 9.0], [0.2, 0.0, 0.1], [-0.3, 0.1, 9.0]]
    advantages = [[1.0] * 3, [1.0] * 3, [-1.0] * 3, [-1.0] * 3]
    inputs = make_inputs(log_ratios, advantages, MASK * 2, clip_ratio_low=0.05, clip_ratio_high=0.05)

    per_token, statistics, is_sequence_level = loss(inputs)

    assert_close(per_token, [[-1.05] * 3, [-low, -low, 0], [high] * 3, [0.95, 0.95, 0]])
    assert_close(gradient(inputs, loss), [[0.0] * 3, [-low, -low, 0], [high] * 3, [0.0] * 3])
    assert statistics["pg_clipfrac_higher"].tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert_close(statistics["ppo_kl"][0], [-0.2, 0.0, -0.1])
    assert not is_sequence_level


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_gspo_has_a_second_bound_for_responses_with_a_negative_advantage(loss):
    # Ratio e^((1 + 2) / 2) = 4.48 above the dual bound 3, and e^0.5 = 1.65 below it; bounds 0.95 and 1.05.
    #   A = -2: min(2 * 4.48, 2 * 3) = 6, no gradient;  min(2 * 1.65, 6) = 3.30
    #   A = 1:  -1.05, clipped at the first bound;      the second does not apply
    log_ratios = [[1.0, 2.0, 9.0], [0.2, 0.8, 9.0], [1.0, 2.0, 9.0]]
    advantages, mask = [[-2.0] * 3, [-2.0] * 3, [1.0] * 3], [[1, 1, 0]] * 3
    inputs = make_inputs(
        log_ratios, advantages, mask, clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_dual=3.0
    )

    per_token, statistics, _ = loss(inputs)

    below = 2 * math.exp(0.5)
    assert_close(per_token, [[6.0, 6.0, 0], [below, below, 0], [-1.05, -1.05, 0]])
    assert_close(gradient(inputs, loss), [[0.0] * 3, [below, below, 0], [0.0] * 3])
    assert statistics["pg_clipfrac_lower"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert statistics["pg_clipfrac_higher"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_gspo_equals_gspo_token_for_equal_advantages_in_a_response(mode):
    generator = torch.Generator().manual_seed(0)
    log_ratios = (torch.randn(6, 5, generator=generator) * 0.3).tolist()
    advantages = torch.randn(6, 1, generator=generator).expand(6, 5).tolist()
    lengths = torch.tensor([5, 3, 1, 4, 2, 0])
    mask = (torch.arange(5) < lengths[:, None]).long()
    inputs = make_inputs(log_ratios, advantages, mask.tolist())
    denominators = count_denominators(mask)._replace(max_length=5.0)

    values = [aggregate_loss(loss(inputs).per_token, mask, mode, denominators) for loss in (gspo, gspo_token)]
    grads = [torch.autograd.grad(value, inputs.log_probs)[0] for value in values]

    torch.testing.assert_close(*values)
    torch.testing.assert_close(*grads)
    assert grads[0].ne(0).any()


def test_gspo_shares_a_tokens_gradient_with_its_response_and_gspo_token_does_not():
    # Ratio 1, advantages 3 and -1: in gspo both follow the mean 1, in gspo_token each its own.
    inputs = make_inputs([[0.0, 0.0]], [[3.0, -1.0]], [[1, 1]])

    assert_close(gspo(inputs).per_token, [[-3.0, 1.0]])
    assert_close(gspo_token(inputs).per_token, [[-3.0, 1.0]])
    assert_close(gradient(inputs, gspo), [[-1.0, -1.0]])
    assert_close(gradient(inputs, gspo_token), [[-3.0, 1.0]])


@pytest.mark.parametrize("loss", [gspo, gspo_token, geo_mean])
def test_ratios_that_overflow_stay_finite(loss):
    inputs = make_inputs([[500.0, 500.0], [-500.0, -500.0]], [[-1.0, -1.0], [1.0, 1.0]], [[1, 1], [1, 1]])

    assert loss(inputs).per_token.isfinite().all()
    assert gradient(inputs, loss).isfinite().all()


def test_geo_mean_by_hand():
    # Bounds on the log-ratio: from above for good responses, from below for bad ones.
    #   A =  1: (min(0.6, 0.4) - 0.2 - 0.5) / 3 = -0.1;   loss -e^-0.1, the first token has no gradient
    #   A = -2: (0.6 + max(-0.6, -0.4)) / 2 = 0.1;        loss 2 e^0.1, the second token has none
    log_ratios, advantages = [[0.6, -0.2, -0.5], [0.6, -0.6, 9.0]], [[1.0] * 3, [-2.0, -2.0, 7.0]]
    inputs = make_inputs(log_ratios, advantages, MASK, clip_ratio_low=0.4, clip_ratio_high=0.4)

    per_token, statistics, is_sequence_level = geo_mean(inputs)

    low, high = math.exp(-0.1), math.exp(0.1)
    assert_close(per_token, [[-low] * 3, [2 * high, 2 * high, 0]])
    # Summed over tokens: the sequence's loss times its length, over the length in its mean.
    assert_close(gradient(inputs, geo_mean), [[0.0, -low, -low], [2 * high, 0.0, 0.0]])
    assert statistics["pg_clipfrac_higher"].tolist() == [[1, 0, 0], [0, 1, 0]]
    assert is_sequence_level


def test_geo_mean_takes_the_mean_of_the_advantages_of_a_response():
    inputs = make_inputs([[0.1, 0.3, 0.0]], [[3.0, -1.0, 0.0]], [[1, 1, 0]], clip_ratio_high=0.4)

    assert_close(geo_mean(inputs).per_token, [[-math.exp(0.2), -math.exp(0.2), 0.0]])


def test_geo_mean_averaged_over_sequences_is_the_mean_of_the_paper():
    log_ratios, advantages = [[0.1, 0.3, 0.2], [0.1, -0.1, 0.0]], [[2.0] * 3, [-1.0] * 3]
    inputs = make_inputs(log_ratios, advantages, MASK, clip_ratio_low=0.4, clip_ratio_high=0.4)

    loss = aggregate_loss(
        geo_mean(inputs).per_token, inputs.response_mask, "seq", count_denominators(inputs.response_mask)
    )

    torch.testing.assert_close(loss, torch.tensor((-2 * math.exp(0.2) + 1) / 2))


def test_sppo_by_hand():
    # Sums of log-ratios 0.6 and 0.4; eta 1/2; advantages 1 and -2: (0.6 - 0.5)^2 and (0.4 + 1)^2.
    log_ratios, advantages = [[0.5, -0.1, 0.2], [0.1, 0.3, 9.0]], [[1.0] * 3, [-2.0, -2.0, 9.0]]
    inputs = make_inputs(log_ratios, advantages, MASK, sppo_eta=0.5)

    per_token, _, is_sequence_level = sppo(inputs)
    mask = inputs.response_mask
    loss = aggregate_loss(per_token, mask, "seq", count_denominators(mask))

    assert_close(per_token, [[0.01] * 3, [1.96, 1.96, 0]])
    torch.testing.assert_close(loss, torch.tensor((0.01 + 1.96) / 2))
    # 2 (sum - target) at every token, over the two sequences.
    assert_close(torch.autograd.grad(loss, inputs.log_probs)[0], [[0.1, 0.1, 0.1], [1.4, 1.4, 0.0]])
    assert is_sequence_level


def test_sppo_is_minimal_at_the_target_log_ratio():
    inputs = make_inputs([[0.5, 1.5], [-1.0, -2.0]], [[1.0, 1.0], [-1.5, -1.5]], [[1, 1]] * 2, sppo_eta=2.0)

    assert_close(gradient(inputs, sppo), [[0.0, 0.0], [0.0, 0.0]])
