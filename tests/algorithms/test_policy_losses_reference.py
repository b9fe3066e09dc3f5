# SPDX-License-Identifier: Apache-2.0
"""Every policy loss under every aggregation, against loops over single tokens in float64."""

import math
from dataclasses import fields, replace

import pytest
import torch

from verl.algorithms.aggregation import AGGREGATIONS, aggregate_loss, count_denominators
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs, weighted

LOW, HIGH, DUAL = 0.2, 0.3, 3.0
MAX_LENGTH = 8.0
TENSORS = ("log_probs", "old_log_probs", "advantages", "response_mask")


def make_inputs(spread=0.8, rows=12, width=7):
    """Log-ratios on both sides of all bounds; rows of all lengths, a hole, and one without tokens."""
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(rows, width, generator=generator) * 3 - 0.05
    log_probs = (old + torch.randn(rows, width, generator=generator) * spread).clamp(max=-0.01)
    advantages = torch.randn(rows, width, generator=generator)
    advantages[3, 1] = 0.0
    lengths = torch.tensor([width, 0, 1, width, *range(2, rows - 2)]).clamp(max=width)
    mask = (torch.arange(width) < lengths[:, None]).long()
    mask[0, 2] = 0  # written by a tool
    return PolicyLossInputs(
        log_probs.requires_grad_(),
        old,
        advantages,
        mask,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_dual=DUAL,
        tau_positive=1.0,
        tau_negative=1.5,
        ppo_kl_coef=0.3,
        dro_beta=0.7,
        sppo_eta=0.8,
        selected=torch.rand(rows, width, generator=generator) < 0.3,
    )


def bounded(ratio, a, dual=math.inf):
    """-A ratio, with the ratio replaced by its bound where one is active."""
    if a >= 0:
        return -a * (ratio if ratio < 1 + HIGH else 1 + HIGH)
    if ratio < 1 - LOW:
        return -a * (1 - LOW) + 0 * ratio
    return -a * (ratio if ratio < dual else dual)


def reference_dppo(p, old, a, is_inside):
    weight = min(float(p.detach() / old), DUAL)
    return -a * weight * p.log() if is_inside else 0 * p


def binary_kl(p, old):
    return float(old * (old / p).log() + (1 - old) * ((1 - old + 1e-8) / (1 - p + 1e-8)).log())


def reference_row(name, p, old, a, selected):
    """The losses of one response, from probabilities (n,), old ones, advantages and a choice of tokens."""
    n, mean_a = len(p), a.mean()
    ratio = p / old
    if name in ("gspo", "gspo_token"):
        whole = ratio.prod() ** (1 / n)
        own = [whole] * n if name == "gspo" else [whole.detach() * x / x.detach() for x in p]
        return [bounded(r, x, DUAL) for r, x in zip(own, a, strict=True)]
    if name == "geo_mean":
        logs = [
            torch.minimum(r.log(), torch.tensor(HIGH))
            if mean_a > 0
            else torch.maximum(r.log(), torch.tensor(-LOW))
            for r in ratio
        ]
        return [-mean_a * torch.stack(logs).mean().exp()] * n
    if name == "sppo":
        return [(ratio.prod().log() - 0.8 * mean_a) ** 2] * n
    tokens = zip(p, old, ratio, a, selected, strict=True)
    return [reference_token(name, *token) for token in tokens]


def reference_token(name, p, old, ratio, a, selected):
    tau = 1.0 if a > 0 else 1.5
    move = float(p.detach() - old)
    kl = binary_kl(p.detach(), old)
    losses = {
        "default": lambda: bounded(ratio, a, DUAL),
        "gpg": lambda: -a * p.log(),
        "cispo": lambda: -a * min(max(float(ratio.detach()), 1 - LOW), 1 + HIGH) * p.log(),
        "sapo": lambda: -a * 4 / (tau * (1 + torch.exp(tau * (1 - ratio)))),
        "clip_cov": lambda: 0 * p if selected else bounded(ratio, a),
        "kl_cov": lambda: -a * ratio + (0.3 * (p / old).log().abs() if selected else 0),
        "dppo_tv": lambda: reference_dppo(p, old, a, move <= HIGH if a > 0 else move >= -LOW),
        "dppo_kl": lambda: reference_dppo(
            p, old, a, (kl <= HIGH or move <= 0) if a > 0 else (kl <= LOW or move >= 0)
        ),
        # The completed square differs by a term that does not depend on the policy.
        "dro": lambda: (a - 0.7 * ratio.log()) ** 2 / 1.4 - a * old.log() - a**2 / 1.4,
    }
    return losses[name]()


def reference_rows(name, inputs, log_probs):
    """The losses of the responses that have tokens, one list for each."""
    rows = []
    for i, mask in enumerate(inputs.response_mask.bool()):
        if mask.any():
            rows.append(
                reference_row(
                    name,
                    log_probs[i][mask].exp(),
                    inputs.old_log_probs[i][mask].double().exp(),
                    inputs.advantages[i][mask].double(),
                    inputs.selected[i][mask],
                )
            )
    return rows


def reference_aggregate(mode, rows):
    tokens = [value for row in rows for value in row]
    return {
        "token": lambda: sum(tokens) / len(tokens),
        "seq": lambda: sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq_sum": lambda: sum(tokens) / len(rows),
        "seq_sum_norm": lambda: sum(tokens) / len(rows) / MAX_LENGTH,
    }[mode]()


def loss_of(name, mode, inputs):
    return share_of(name, mode, inputs, denominators_of(inputs.response_mask))


def share_of(name, mode, inputs, denominators):
    per_token = POLICY_LOSSES[name](inputs).per_token
    return aggregate_loss(per_token, inputs.response_mask, mode, denominators)


def denominators_of(mask):
    return count_denominators(mask)._replace(max_length=MAX_LENGTH)


def gradient(loss, inputs):
    return torch.autograd.grad(loss, inputs.log_probs)[0]


def rows_of(inputs, rows, log_probs):
    tensors = {name: getattr(inputs, name)[rows] for name in ("old_log_probs", "advantages", "response_mask")}
    return replace(inputs, log_probs=log_probs[rows], selected=inputs.selected[rows], **tensors)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_loss_and_gradient_are_those_of_a_loop_in_float64(name, mode):
    inputs = make_inputs()
    loss = loss_of(name, mode, inputs)

    log_probs = inputs.log_probs.detach().double().requires_grad_()
    expected = reference_aggregate(mode, reference_rows(name, inputs, log_probs))

    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-7)
    expected_gradient = torch.autograd.grad(expected, log_probs)[0]
    torch.testing.assert_close(gradient(loss, inputs).double(), expected_gradient, rtol=1e-5, atol=1e-7)
    assert expected_gradient[inputs.response_mask == 1].ne(0).any()


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize(
    "split", [[[0, 1, 2], [3, 4, 5, 6, 7, 8], [9, 10, 11]], [[11, 3, 7, 0], [], [1], [2, 10, 9, 8, 4, 5, 6]]]
)
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(name, mode, split):
    inputs = make_inputs()
    whole = loss_of(name, mode, inputs)
    denominators = denominators_of(inputs.response_mask)

    shares = [share_of(name, mode, rows_of(inputs, rows, inputs.log_probs), denominators) for rows in split]

    torch.testing.assert_close(sum(shares), whole, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        gradient(sum(shares), inputs), gradient(loss_of(name, mode, inputs), inputs), rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padding_has_no_loss_and_no_gradient(name, dtype):
    clean = make_inputs()
    padding = clean.response_mask == 0
    dirty = replace(
        clean,
        log_probs=clean.log_probs.detach().masked_fill(padding, math.nan).requires_grad_(),
        old_log_probs=clean.old_log_probs.masked_fill(padding, math.inf),
        advantages=clean.advantages.masked_fill(padding, math.nan),
        selected=clean.selected | padding,
        response_mask=clean.response_mask.to(dtype),
    )

    found, expected = POLICY_LOSSES[name](dirty), POLICY_LOSSES[name](clean)

    assert found.per_token.isfinite().all()
    torch.testing.assert_close(found.per_token[~padding], expected.per_token[~padding])
    for key, values in expected.statistics.items():
        torch.testing.assert_close(found.statistics[key][~padding], values[~padding])
        assert found.statistics[key].isfinite().all()
    grad = gradient(found.per_token.sum(), dirty)
    assert grad[padding].eq(0).all()
    torch.testing.assert_close(grad, gradient(expected.per_token.sum(), clean))


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_the_padded_width_does_not_matter(name):
    inputs = make_inputs()
    wide = replace(
        inputs,
        **{
            key: torch.nn.functional.pad(getattr(inputs, key).detach(), (0, 4), value=0)
            for key in (*TENSORS, "selected")
        },
    )

    torch.testing.assert_close(
        POLICY_LOSSES[name](wide).per_token[:, :-4], POLICY_LOSSES[name](inputs).per_token
    )


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_statistics_are_one_number_for_each_token_without_gradient(name):
    inputs = make_inputs()

    statistics = POLICY_LOSSES[name](inputs).statistics

    assert "ppo_kl" in statistics
    for values in statistics.values():
        assert values.shape == inputs.log_probs.shape
        assert values.dtype == torch.float32
        assert not values.requires_grad


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("name", sorted({*POLICY_LOSSES} - {"geo_mean", "sppo"}))
def test_at_ratio_one_every_loss_is_the_plain_policy_gradient(name, mode):
    # Advantages are one for each response, as of every outcome reward; nothing is selected.
    inputs = make_inputs(spread=0.0)
    advantages = inputs.advantages[:, :1].expand_as(inputs.advantages)
    inputs = replace(inputs, advantages=advantages, selected=torch.zeros_like(inputs.selected))

    torch.testing.assert_close(
        gradient(loss_of(name, mode, inputs), inputs), gradient(loss_of("gpg", mode, inputs), inputs)
    )


def test_at_ratio_one_geo_mean_is_the_policy_gradient_and_sppo_twice_that_of_sums():
    inputs = make_inputs(spread=0.0)
    inputs = replace(inputs, advantages=inputs.advantages[:, :1].expand_as(inputs.advantages), sppo_eta=1.0)

    def grad(name, mode):
        return gradient(loss_of(name, mode, inputs), inputs)

    torch.testing.assert_close(grad("geo_mean", "seq"), grad("gpg", "seq"))
    torch.testing.assert_close(grad("sppo", "seq"), 2 * grad("gpg", "seq_sum"))


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_weighted_losses_are_those_of_a_loop_in_float64(name, mode):
    inputs = make_inputs()
    mask = inputs.response_mask
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(5)) * 2 + 0.1
    loss = weighted(POLICY_LOSSES[name](inputs), weights, mask)
    value = aggregate_loss(loss.per_token, mask, mode, denominators_of(mask))

    log_probs = inputs.log_probs.detach().double().requires_grad_()
    rows = []
    own_weights = [w[m].double() for w, m in zip(weights, mask.bool(), strict=True) if m.any()]
    for row, w in zip(reference_rows(name, inputs, log_probs), own_weights, strict=True):
        one = w.prod() ** (1 / len(w))
        rows.append([x * (one if loss.is_sequence_level else y) for x, y in zip(row, w, strict=True)])
    expected = reference_aggregate(mode, rows)

    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        gradient(value, inputs).double(), torch.autograd.grad(expected, log_probs)[0], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize("field", TENSORS)
def test_tensors_that_would_broadcast_are_rejected(name, field):
    inputs = make_inputs()

    with pytest.raises(ValueError, match=field):
        POLICY_LOSSES[name](replace(inputs, **{field: getattr(inputs, field)[:, :1]}))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_selection_that_would_broadcast_is_rejected(name):
    inputs = make_inputs()

    with pytest.raises(ValueError, match="selected"):
        POLICY_LOSSES[name](replace(inputs, selected=inputs.selected[:1]))


def test_every_option_has_a_default():
    assert [field.name for field in fields(PolicyLossInputs) if not field.kw_only][:4] == list(TENSORS)
    PolicyLossInputs(*torch.zeros(4, 2, 3))
