# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.algorithms.resampling import overlong_penalty


def test_the_penalty_falls_in_a_straight_line_over_the_buffer():
    # The buffer goes from 10 - 4 = 6 to 10 tokens; 7 tokens are a quarter into it.
    penalty = overlong_penalty(torch.tensor([1, 6, 7, 8, 10]), max_length=10, buffer_length=4, factor=2.0)

    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, -0.5, -1.0, -2.0]))


def test_the_penalty_is_bounded_beyond_the_maximum_length():
    assert overlong_penalty(torch.tensor([14]), 10, 4, 1.0).tolist() == [-1.0]


def test_a_buffer_of_the_maximum_length_penalizes_every_token():
    # 3 of 10 tokens.
    torch.testing.assert_close(overlong_penalty(torch.tensor([3]), 10, 10, 1.0), torch.tensor([-0.3]))


@pytest.mark.parametrize("buffer_length", [0, 11])
def test_a_buffer_outside_of_the_response_is_rejected(buffer_length):
    message = rf"overlong_buffer_length` must be from 1 to .* \(10\) to penalize, got {buffer_length}"
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([3]), 10, buffer_length, 1.0)
