# SPDX-License-Identifier: Apache-2.0
"""From the options of a run to sizes and steps."""

from random import Random
from typing import Any

from verl.config.rollout import RolloutConfig
from verl.diffusion.families.interface import DiffusionFamily, Size
from verl.diffusion.sampler import NoiseSchedule


def size_of(rollout: RolloutConfig, family: DiffusionFamily) -> Size:
    """Return the size of what is made: `resolution` of images; `height`, `width`, `num_frames` of videos."""
    if family.makes == "images":
        return Size(rollout.resolution, rollout.resolution)
    return Size(rollout.height, rollout.width, rollout.num_frames)


def schedule_of(
    rollout: RolloutConfig, family: DiffusionFamily, parts: Any, size: Size, *, certain: bool = False
) -> NoiseSchedule:
    """Return the steps of sampling; `certain` without noise, as in validation."""
    steps = rollout.val_num_steps if certain and rollout.val_num_steps else rollout.num_steps
    sigmas, times = family.times(parts, steps, size)
    noisy = () if certain else noisy_steps(rollout, steps)
    return NoiseSchedule(sigmas, times, rollout.noise_level, rollout.sde_type, noisy)


def noisy_steps(rollout: RolloutConfig, steps: int) -> tuple[int, ...]:
    """Return the steps that draw noise: those of `sde_window`, or all but the last, which ends without."""
    first, stop = rollout.sde_window or (0, steps - 1)
    return tuple(range(first, min(stop, steps - 1)))


def trained_steps(rollout: RolloutConfig, name: str) -> list[int]:
    """Return the steps of a picture that a policy is trained on, which follow from the name of the picture.

    Validation may take more steps; it trains none of them.
    """
    noisy = noisy_steps(rollout, rollout.num_steps)
    count = max(1, round(rollout.train_timestep_fraction * len(noisy)))
    return sorted(Random(f"{rollout.seed} {name}").sample(noisy, count))
