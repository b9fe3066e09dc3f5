# SPDX-License-Identifier: Apache-2.0
"""Sampling with a flow model, and the log-probs of what was sampled under other weights.

Steps play the part of tokens: a trajectory of S steps has log-probs (B, S), and everything that reads
log-probs of tokens reads these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.config.rollout import RolloutConfig
from verl.diffusion import sde
from verl.diffusion.families.interface import DiffusionFamily, Size
from verl.diffusion.sde import Gaussian

Velocity = Callable[[Tensor, Tensor], Tensor]  # of latents (B, ...) at times (B,)


@dataclass(frozen=True)
class NoiseSchedule:
    """The steps of a sampler, which are those of the model's own scheduler."""

    sigmas: Tensor  # (S + 1,) float32, from 1 to 0
    times: Tensor  # (S,) float32, as the model reads them
    noise_level: float  # of steps that draw noise
    kind: str  # `sde` or `cps`
    noisy: tuple[int, ...]  # numbers of the steps that draw noise, on which a model can be trained

    @property
    def num_steps(self) -> int:
        return len(self.times)

    def after(self, numbers: Tensor, latents: Tensor, velocity: Tensor) -> Gaussian:
        """Return the distribution of latents (B, ...) after the steps of these numbers (B,)."""
        device, numbers = latents.device, numbers.cpu()
        levels = torch.zeros(self.num_steps)
        levels[list(self.noisy)] = self.noise_level
        sigma, later, level = self.sigmas[numbers], self.sigmas[numbers + 1], levels[numbers]
        return sde.step(
            latents, velocity, sigma.to(device), later.to(device), noise_level=level.to(device),
            kind=self.kind, largest=float(self.sigmas[1]),
        )  # fmt: skip


class Trajectories(NamedTuple):
    """Latents before and after each sampled step, and the log-probs of the noisy ones."""

    latents: Tensor  # (B, S + 1, ...) float32
    log_probs: Tensor  # (B, S) float32; 0 where a step is certain
    kl: Tensor | None  # (B, S) float32, to the steps of a reference


@torch.no_grad()
def sample(
    velocity: Velocity,
    latents: Tensor,
    schedule: NoiseSchedule,
    generators: Sequence[torch.Generator],
    reference: Velocity | None = None,
) -> Trajectories:
    """Sample from pure noise (B, ...) float32; each row draws from its own generator, on the CPU.

    With the velocity of a reference, the KL of each noisy step to the reference's is computed too.
    """
    states = [latents]
    log_probs = torch.zeros(len(latents), schedule.num_steps, device=latents.device)
    kl = torch.zeros_like(log_probs)
    for number in range(schedule.num_steps):
        numbers = torch.full((len(latents),), number)
        times = schedule.times[numbers].to(latents.device)
        after = schedule.after(numbers, states[-1], velocity(states[-1], times))
        following = after.mean
        if number in schedule.noisy:
            drawn = [torch.randn(latents.shape[1:], generator=generator) for generator in generators]
            following = after.sample(torch.stack(drawn).to(latents.device))
            log_probs[:, number] = after.log_prob(following)
            if reference is not None:
                kl[:, number] = after.kl(schedule.after(numbers, states[-1], reference(states[-1], times)))
        states.append(following)
    return Trajectories(torch.stack(states, 1), log_probs, None if reference is None else kl)


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
