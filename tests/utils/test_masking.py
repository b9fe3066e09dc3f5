# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.utils.masking import check_same_shape, masked_mean, masked_sum


def test_masked_mean_counts_only_what_the_mask_keeps():
    # (1 + 4) / 2 over all; rows: 1 / 1 and 4 / 1.
    values = torch.tensor([[1.0, 9.0], [9.0, 4.0]])
    mask = torch.tensor([[1, 0], [0, 1]])

    assert masked_mean(values, mask).item() == 2.5
    assert masked_mean(values, mask, -1).tolist() == [1.0, 4.0]
    assert masked_sum(values, mask).item() == 5.0


def test_masked_mean_of_nothing_is_zero():
    assert masked_mean(torch.ones(2, 3), torch.zeros(2, 3), -1).tolist() == [0.0, 0.0]


def test_what_is_masked_out_does_not_count_even_when_it_is_not_finite():
    values = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)

    mean = masked_mean(values, torch.tensor([True, False, False]))
    mean.backward()

    assert mean.item() == 1.0
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_shapes_that_would_broadcast_are_refused_with_their_names():
    with pytest.raises(ValueError, match=r"one shape, got rewards \(3, 2\), mask \(3, 1\)"):
        check_same_shape(rewards=torch.ones(3, 2), mask=torch.ones(3, 1), missing=None)
