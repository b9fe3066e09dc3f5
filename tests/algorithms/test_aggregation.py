# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.algorithms.aggregation import AGGREGATIONS, LossDenominators, aggregate_loss, count_denominators

# Three sequences of 3, 1 and 2 tokens: token sums 6, 10, 9, means 2, 10, 4.5.
LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [4.0, 5.0, 99.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])


def test_token_is_the_mean_over_all_tokens():
    loss = aggregate_loss(LOSS, MASK, "token", count_denominators(MASK))

    torch.testing.assert_close(loss, torch.tensor(25 / 6))


def test_seq_is_the_mean_over_sequences_of_their_means():
    loss = aggregate_loss(LOSS, MASK, "seq", count_denominators(MASK))

    torch.testing.assert_close(loss, torch.tensor((2 + 10 + 4.5) / 3))


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@pytest.mark.parametrize("split", [[[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]], [[1, 2], [0]]])
def test_shares_of_micro_batches_add_up_to_the_loss_of_the_mini_batch(mode, split):
    denominators = count_denominators(MASK)
    whole = aggregate_loss(LOSS, MASK, mode, denominators)

    shares = [aggregate_loss(LOSS[rows], MASK[rows], mode, denominators) for rows in split]

    torch.testing.assert_close(sum(shares), whole)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_the_padded_width_does_not_matter(mode):
    wide = torch.nn.functional.pad(LOSS, (0, 5), value=7.0)
    wide_mask = torch.nn.functional.pad(MASK, (0, 5))

    torch.testing.assert_close(
        aggregate_loss(wide, wide_mask, mode, count_denominators(wide_mask)),
        aggregate_loss(LOSS, MASK, mode, count_denominators(MASK)),
    )


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_nan_in_the_padding_reaches_neither_loss_nor_gradient(mode):
    loss = LOSS.masked_fill(MASK == 0, float("nan")).requires_grad_()

    value = aggregate_loss(loss, MASK, mode, count_denominators(MASK))

    torch.testing.assert_close(value.detach(), aggregate_loss(LOSS, MASK, mode, count_denominators(MASK)))
    grad = torch.autograd.grad(value, loss)[0]
    assert grad.isfinite().all()
    assert grad[MASK == 0].eq(0).all()


@pytest.mark.parametrize(("mode", "expected"), [("token", 16 / 4), ("seq", (2 + 10) / 2)])
def test_a_sequence_without_tokens_changes_nothing(mode, expected):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])

    assert count_denominators(mask) == (4, 2)
    torch.testing.assert_close(
        aggregate_loss(LOSS, mask, mode, count_denominators(mask)), torch.tensor(expected)
    )


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_a_mini_batch_without_tokens_has_loss_zero(mode):
    mask = torch.zeros_like(MASK)

    assert aggregate_loss(LOSS, mask, mode, count_denominators(mask)) == 0


def test_shapes_that_would_broadcast_are_rejected():
    with pytest.raises(ValueError, match=r"per_token \(3, 3\), mask \(3, 1\)"):
        aggregate_loss(LOSS, MASK[:, :1], "token", count_denominators(MASK))


def test_an_unknown_mode_is_an_error_that_names_the_option():
    with pytest.raises(ValueError, match=r"`worker.actor.loss_avg_mode` must be one of \['seq', 'token'\]"):
        aggregate_loss(LOSS, MASK, "tokens", LossDenominators(torch.tensor(1.0), torch.tensor(1.0)))
