# SPDX-License-Identifier: Apache-2.0
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from verl.algorithms.aggregation import AGGREGATIONS, aggregate_loss, count_denominators
from verl.algorithms.value_losses import clipped_value_loss

FIELDS = ("values", "old_values", "returns", "response_mask")


class Inputs(NamedTuple):
    values: Tensor
    old_values: Tensor
    returns: Tensor
    response_mask: Tensor
    cliprange_value: float = 0.5


def make_inputs(values, old_values, returns, mask=None, cliprange_value=0.5):
    values = torch.tensor(values).requires_grad_()
    mask = torch.ones_like(values, dtype=torch.int64) if mask is None else torch.tensor(mask)
    return Inputs(values, torch.tensor(old_values), torch.tensor(returns), mask, cliprange_value)


def gradient(inputs):
    return torch.autograd.grad(clipped_value_loss(*inputs).per_token.sum(), inputs.values)[0]


def random_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    return Inputs(values.requires_grad_(), old_values, returns, mask)


def reference_loss(value, old, target, bound):
    """Case by case: which of the two errors counts, and whether it has a gradient."""
    if old - bound <= value <= old + bound:
        return (value - target) ** 2 / 2
    edge = old + bound if value > old else old - bound
    return max((value - target) ** 2, (edge - target) ** 2) / 2


def test_the_value_loss_by_hand():
    # The old value is 1, values may move to [0.5, 1.5], the return is 2.
    #   value   error^2   clipped   its error^2   loss           gradient
    #   1.4     0.36      1.4       0.36          0.18           -0.6
    #   1.8     0.04      1.5       0.25          0.125          0        came nearer by more than 0.5
    #   0.2     3.24      0.5       2.25          1.62           -1.8     moved away: pulled back
    #   3.0     1.00      1.5       0.25          0.5            1.0      overshot
    inputs = make_inputs([[1.4, 1.8], [0.2, 3.0]], [[1.0, 1.0], [1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]])

    per_token, statistics = clipped_value_loss(*inputs)

    torch.testing.assert_close(per_token, torch.tensor([[0.18, 0.125], [1.62, 0.5]]))
    torch.testing.assert_close(gradient(inputs), torch.tensor([[-0.6, 0.0], [-1.8, 1.0]]))
    assert statistics["vf_clipfrac"].tolist() == [[0, 1], [0, 0]]
    torch.testing.assert_close(statistics["vpred_mean"], inputs.values.detach())


def test_the_value_loss_without_a_bound_is_half_the_squared_error():
    inputs = make_inputs([[5.0, -3.0]], [[0.0, 0.0]], [[1.0, 1.0]], cliprange_value=math.inf)

    torch.testing.assert_close(clipped_value_loss(*inputs).per_token, torch.tensor([[8.0, 8.0]]))


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_loss_and_gradient_are_those_of_a_loop_in_float64(mode):
    inputs = random_inputs()
    denominators = count_denominators(inputs.response_mask)._replace(max_length=8.0)
    loss = aggregate_loss(clipped_value_loss(*inputs).per_token, inputs.response_mask, mode, denominators)

    values = inputs.values.detach().double().requires_grad_()
    rows = [
        [
            reference_loss(values[i, t], inputs.old_values[i, t].double(), inputs.returns[i, t].double(), 0.5)
            for t in range(6)
            if inputs.response_mask[i, t]
        ]
        for i in range(3)
    ]
    expected = {
        "token": sum(map(sum, rows)) / 10,
        "seq": sum(sum(row) / len(row) for row in rows) / 3,
        "seq_sum": sum(map(sum, rows)) / 3,
        "seq_sum_norm": sum(map(sum, rows)) / 3 / 8,
    }[mode]

    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(loss, inputs.values)[0].double(),
        torch.autograd.grad(expected, values)[0],
        rtol=1e-5,
        atol=1e-8,
    )


def test_padding_changes_neither_loss_nor_gradient():
    clean = random_inputs()
    padding = clean.response_mask == 0
    dirty = Inputs(
        clean.values.detach().masked_fill(padding, math.nan).requires_grad_(),
        clean.old_values.masked_fill(padding, math.inf),
        clean.returns.masked_fill(padding, math.nan),
        clean.response_mask,
    )

    per_token, statistics = clipped_value_loss(*dirty)

    torch.testing.assert_close(per_token[~padding], clipped_value_loss(*clean).per_token[~padding])
    assert per_token[padding].eq(0).all()
    assert all(values.isfinite().all() for values in statistics.values())
    torch.testing.assert_close(gradient(dirty), gradient(clean))
    assert gradient(dirty)[padding].eq(0).all()


def test_statistics_carry_no_gradient():
    assert not any(
        values.requires_grad for values in clipped_value_loss(*random_inputs()).statistics.values()
    )


@pytest.mark.parametrize("name", FIELDS)
def test_tensors_that_would_broadcast_are_rejected(name):
    fields = {field: torch.zeros(3, 2) for field in FIELDS}

    with pytest.raises(ValueError, match=name):
        clipped_value_loss(**fields | {name: torch.zeros(3, 1)})
