# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.algorithms.aggregation import AGGREGATIONS, LossDenominators, aggregate_loss, count_denominators

# Three sequences of 3, 1 and 2 tokens: token sums 6, 10, 9, means 2, 10, 4.5.
LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [4.0, 5.0, 99.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
MAX_LENGTH = 4.0


def denominators_of(mask):
    return count_denominators(mask)._replace(max_length=MAX_LENGTH)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", (6 + 10 + 9) / 6),  # every token weighs the same
        ("seq", (2 + 10 + 4.5) / 3),  # every sequence weighs the same
        ("seq_sum", (6 + 10 + 9) / 3),
        ("seq_sum_norm", (6 + 10 + 9) / 3 / 4),  # 4 tokens are the longest response that is allowed
    ],
)
def test_modes_by_hand(mode, expected):
    torch.testing.assert_close(
        aggregate_loss(LOSS, MASK, mode, denominators_of(MASK)), torch.tensor(expected)
    )


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token", [[1 / 6, 1 / 6, 1 / 6], [1 / 6, 0, 0], [1 / 6, 1 / 6, 0]]),
        ("seq", [[1 / 9, 1 / 9, 1 / 9], [1 / 3, 0, 0], [1 / 6, 1 / 6, 0]]),
        ("seq_sum", [[1 / 3, 1 / 3, 1 / 3], [1 / 3, 0, 0], [1 / 3, 1 / 3, 0]]),
        ("seq_sum_norm", [[1 / 12, 1 / 12, 1 / 12], [1 / 12, 0, 0], [1 / 12, 1 / 12, 0]]),
    ],
)
def test_the_gradient_is_the_weight_of_each_token(mode, weights):
    loss = LOSS.clone().requires_grad_()

    value = aggregate_loss(loss, MASK, mode, denominators_of(MASK))

    torch.testing.assert_close(torch.autograd.grad(value, loss)[0], torch.tensor(weights))


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_a_row_of_weight_two_counts_as_two_rows(mode):
    weights, twice = torch.tensor([2.0, 1.0, 1.0]), [0, 0, 1, 2]
    denominators = count_denominators(MASK, weights)._replace(max_length=MAX_LENGTH)

    torch.testing.assert_close(
        aggregate_loss(LOSS, MASK, mode, denominators, weights),
        aggregate_loss(LOSS[twice], MASK[twice], mode, denominators_of(MASK[twice])),
    )


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("split", [[[0, 1, 2]], [[0], [1], [2]], [[2, 0], [], [1]], [[1, 2], [0]]])
def test_micro_batch_losses_sum_to_the_mini_batch_loss(mode, split):
    denominators = denominators_of(MASK)
    whole = aggregate_loss(LOSS, MASK, mode, denominators)

    shares = [aggregate_loss(LOSS[rows], MASK[rows], mode, denominators) for rows in split]

    torch.testing.assert_close(sum(shares), whole)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_the_padded_width_does_not_matter(mode):
    wide = torch.nn.functional.pad(LOSS, (0, 5), value=7.0)
    wide_mask = torch.nn.functional.pad(MASK, (0, 5))

    torch.testing.assert_close(
        aggregate_loss(wide, wide_mask, mode, denominators_of(wide_mask)),
        aggregate_loss(LOSS, MASK, mode, denominators_of(MASK)),
    )


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_nan_in_the_padding_reaches_neither_loss_nor_gradient(mode, dtype):
    loss = LOSS.masked_fill(MASK == 0, math.nan).requires_grad_()

    value = aggregate_loss(loss, MASK.to(dtype), mode, denominators_of(MASK.to(dtype)))

    torch.testing.assert_close(value.detach(), aggregate_loss(LOSS, MASK, mode, denominators_of(MASK)))
    grad = torch.autograd.grad(value, loss)[0]
    assert grad.isfinite().all()
    assert grad[MASK == 0].eq(0).all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token", 16 / 4), ("seq", (2 + 10) / 2), ("seq_sum", 16 / 2), ("seq_sum_norm", 16 / 2 / 4)],
)
def test_a_sequence_without_tokens_changes_nothing(mode, expected):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])

    assert count_denominators(mask)[:2] == (4, 2)
    torch.testing.assert_close(
        aggregate_loss(LOSS, mask, mode, denominators_of(mask)), torch.tensor(expected)
    )


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_a_mini_batch_without_tokens_has_loss_zero(mode):
    mask = torch.zeros_like(MASK)

    assert aggregate_loss(LOSS, mask, mode, denominators_of(mask)) == 0


def test_in_seq_sum_norm_token_weights_do_not_depend_on_other_responses():
    def weight(mask):
        loss = LOSS.clone().requires_grad_()
        value = aggregate_loss(loss, mask, "seq_sum_norm", denominators_of(mask))
        return torch.autograd.grad(value, loss)[0][1, 0]

    short, long = torch.tensor([[1, 0, 0], [1, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])

    assert weight(torch.cat([short, short[:1]])) == weight(torch.cat([long, long[:1]]))


@pytest.mark.parametrize("max_length", [math.nan, 0.0, -1.0])
def test_seq_sum_norm_needs_a_maximum_length(max_length):
    denominators = count_denominators(MASK)._replace(max_length=max_length)

    with pytest.raises(ValueError, match=r"seq_sum_norm divides by `data.max_response_length`"):
        aggregate_loss(LOSS, MASK, "seq_sum_norm", denominators)


def test_shapes_that_would_broadcast_are_rejected():
    with pytest.raises(ValueError, match=r"per_token \(3, 3\), mask \(3, 1\)"):
        aggregate_loss(LOSS, MASK[:, :1], "token", denominators_of(MASK))


def test_an_unknown_mode_is_an_error_that_names_the_option():
    with pytest.raises(ValueError, match=r"`worker.actor.loss_avg_mode` must be one of \['seq', 'seq_sum'"):
        aggregate_loss(LOSS, MASK, "tokens", LossDenominators(torch.tensor(1.0), torch.tensor(1.0)))
