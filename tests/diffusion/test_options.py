# SPDX-License-Identifier: Apache-2.0
"""Steps that draw noise, and those of them that are trained."""

import pytest

from verl.config.rollout import RolloutConfig
from verl.diffusion.sampler import noisy_steps, trained_steps


@pytest.mark.parametrize(
    ("window", "steps", "noisy"), [(None, 5, (0, 1, 2, 3)), ([1, 3], 5, (1, 2)), ([1, 9], 5, (1, 2, 3))]
)
def test_a_window_has_noise_and_the_last_step_never(window, steps, noisy):
    assert noisy_steps(RolloutConfig(sde_window=window), steps) == noisy


@pytest.mark.parametrize(("fraction", "count"), [(1.0, 8), (0.5, 4), (0.6, 5), (0.0, 1)])
def test_a_fraction_of_the_noisy_steps_is_trained_and_at_least_one(fraction, count):
    options = RolloutConfig(num_steps=10, sde_window=[0, 8], train_timestep_fraction=fraction)
    drawn = trained_steps(options, "a")

    assert drawn == sorted(set(drawn)) and len(drawn) == count
    assert set(drawn) <= set(range(8))
    assert drawn == trained_steps(options, "a")


def test_other_pictures_are_trained_on_other_steps():
    options = RolloutConfig(num_steps=10, train_timestep_fraction=0.5)

    assert len({tuple(trained_steps(options, str(name))) for name in range(20)}) > 10
