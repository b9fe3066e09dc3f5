# SPDX-License-Identifier: Apache-2.0
"""Steps of a flow model's sampler as Gaussian policies: their means, deviations, log-probs and KL.

A latent is `x = (1 - sigma) x0 + sigma e` of an image x0 and noise e; the model predicts the velocity
`v = e - x0`. Sampling goes from sigma 1 to 0; a step from `sigma` to `next_sigma` draws from a Gaussian:

    sde   Flow-GRPO (Liu et al. 2025, https://arxiv.org/abs/2505.05470), equation 9:
          s = noise_level sqrt(sigma / (1 - sigma)), d = next_sigma - sigma
          mean = x (1 + s^2 d / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) d, std = s sqrt(-d)
    cps   coefficients-preserving sampling (Wang and Yu 2025, https://arxiv.org/abs/2509.05952), equation 14:
          std = next_sigma sin(noise_level pi / 2)
          mean = (1 - next_sigma) (x - sigma v) + sqrt(next_sigma^2 - std^2) (x + (1 - sigma) v)

Without noise both are Euler's step of the ODE, `x + v d`. The deviations of `cps` differ by orders of
magnitude, and the densities of its last steps would outweigh all others: as in its authors' FlowCPS, squared
distances stand for `-log_prob` and KL, without the factor `1 / (2 std^2)`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("sde", "cps")


class Gaussian(NamedTuple):
    """Where a step may lead."""

    mean: Tensor  # (B, ...) float32
    std: Tensor  # (B,) float32; 0: the step is certain
    is_scaled: bool = True  # densities and KL count distances in deviations; False: as they are, as FlowCPS

    def sample(self, noise: Tensor) -> Tensor:
        """Return the next latents for standard normal noise (B, ...)."""
        return self.mean + expanded(self.std, self.mean) * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of next latents (B, ...), (B,): the mean over their elements.

        The sum of thousands of elements would make every ratio 0 or infinite; Flow-GRPO takes the mean too,
        and clips ratios within 1e-4 or so.
        """
        squares = (value.float() - self.mean) ** 2
        if not self.is_scaled:
            return -squares.flatten(1).mean(-1)
        std = expanded(self.std, self.mean)
        density = -squares / (2 * std**2) - torch.log(std)
        return density.flatten(1).mean(-1) - 0.5 * math.log(2 * math.pi)

    def kl(self, other: "Gaussian") -> Tensor:
        """Return the KL divergence from a Gaussian of the same deviation, (B,): the mean over elements."""
        squares = (self.mean - other.mean) ** 2
        if self.is_scaled:
            squares = squares / (2 * expanded(self.std, self.mean) ** 2)
        return squares.flatten(1).mean(-1)


def step(
    latents: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    next_sigma: Tensor,
    *,
    noise_level: Tensor | float,
    kind: str = "sde",
    largest: float = 1.0,
) -> Gaussian:
    """Return the distribution of the latents after a step.

    Args:
        latents: (B, ...).
        velocity: (B, ...), the model's prediction.
        sigma: (B,) in (0, 1].
        next_sigma: (B,) in [0, sigma).
        noise_level: (B,) or (), where 0 is the ODE.
        kind: `sde` or `cps`.
        largest: The sampler's largest sigma below 1: where sigma is 1, `sde` would divide by 0, and takes
            this one for `s`.
    """
    x, v = latents.float(), velocity.float()
    sigma, next_sigma, level = sigma.float(), next_sigma.float(), torch.as_tensor(noise_level)
    if kind == "cps":
        std = next_sigma * torch.sin(level * math.pi / 2)
        kept = torch.sqrt(next_sigma**2 - std**2)
        image, noise = x - expanded(sigma, x) * v, x + expanded(1 - sigma, x) * v
        mean = expanded(1 - next_sigma, x) * image + expanded(kept, x) * noise
        return Gaussian(mean, std, is_scaled=False)
    difference = next_sigma - sigma
    rest = 1 - torch.where(sigma == 1, torch.full_like(sigma, largest), sigma)
    variance = level**2 * sigma / rest  # s^2
    of_latents = 1 + variance * difference / (2 * sigma)
    of_velocity = (1 + variance * (1 - sigma) / (2 * sigma)) * difference
    mean = expanded(of_latents, x) * x + expanded(of_velocity, x) * v
    return Gaussian(mean, torch.sqrt(variance * -difference))


def expanded(values: Tensor, like: Tensor) -> Tensor:
    """Return values (B,) as (B, 1, ...), to be multiplied with `like` (B, ...)."""
    return values.view(-1, *[1] * (like.ndim - 1))
