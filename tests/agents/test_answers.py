# SPDX-License-Identifier: Apache-2.0
"""A tool may return what Python programs compute with; what is no answer is refused by name."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from verl.agents.interface import Observation
from verl.agents.tools.answers import AnswerLimits, BadAnswerError, as_observation

LIMITS = AnswerLimits(1000, "left")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (np.bool_(True), "true"),
        (np.str_("a"), "a"),
        (torch.tensor(2), "2"),
        (Decimal("1.5"), "1.5"),
        ({"found": np.int64(3), "near": [np.float32(0.5)]}, '{"found": 3, "near": [0.5]}'),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
    ],
)
def test_numbers_and_arrays_of_libraries_are_answers(returned, text):
    assert as_observation(returned, LIMITS).text == text


@pytest.mark.parametrize(
    "reward", [np.int64(2), np.float32(2), torch.tensor(2.0), Decimal(2), Fraction(2), 2]
)
def test_numbers_of_libraries_are_rewards(reward):
    observation = as_observation(Observation("", reward=reward), LIMITS)

    assert type(observation.reward) is float and observation.reward == 2


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39, 10**400, Decimal("NaN"), "2", [2]])
def test_a_reward_that_is_not_finite_in_float32_is_refused(reward):
    with pytest.raises(BadAnswerError, match="no finite number in float32"):
        as_observation(Observation("", reward=reward), LIMITS)


def test_a_value_that_is_no_answer_is_named():
    with pytest.raises(BadAnswerError, match="set, not text, an image, JSON values or an Observation"):
        as_observation({1, 2}, LIMITS)
