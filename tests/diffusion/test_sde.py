# SPDX-License-Identifier: Apache-2.0
"""Steps of the sampler against their formulas in float64, and against the ODE."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from verl.diffusion.sde import KINDS, Gaussian, step

SHAPE = (3, 4, 8, 8)
SIGMA = torch.tensor([1.0, 0.7, 0.2])
NEXT = torch.tensor([0.9, 0.6, 0.05])
LARGEST = 0.95


@pytest.fixture
def drawn():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_noise_is_eulers(drawn, kind):
    latents, velocity, *_ = drawn

    found = step(latents, velocity, SIGMA, NEXT, noise_level=0.0, kind=kind, largest=LARGEST)

    expected = latents + velocity * (NEXT - SIGMA).view(-1, 1, 1, 1)
    assert (found.mean - expected).abs().max() < 1e-6
    assert not found.std.any()


def test_the_sde_keeps_the_marginal_distribution(drawn):
    """If x0 is a point and the velocity exact, latents have the mean and variance of their sigma."""
    image, _, noise, more = (
        torch.randn(20_000, generator=torch.Generator().manual_seed(k)) for k in range(4)
    )
    image = torch.full_like(image, 0.3)
    for kind in KINDS:
        sigma, number = 0.8, 400  # small steps: the SDE is exact in the limit
        x, generator = (1 - sigma) * image + sigma * noise, torch.Generator().manual_seed(7)
        for k in range(number):
            now, later = sigma - 0.4 * k / number, sigma - 0.4 * (k + 1) / number
            velocity = (x - image) / now
            both = torch.full((len(x),), now), torch.full((len(x),), later)
            level = 0.7 if kind == "sde" else 0.1
            x = step(x, velocity, *both, noise_level=level, kind=kind).sample(
                torch.randn(len(x), generator=generator)
            )
        assert x.mean() == pytest.approx(0.6 * 0.3, abs=0.01), kind
        assert x.std() == pytest.approx(0.4, abs=0.01), kind
    del more


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_the_normal_distribution_or_of_flowcps_in_float64(drawn, kind):
    latents, velocity, value, _ = drawn
    found = step(latents, velocity, SIGMA, NEXT, noise_level=0.7, kind=kind, largest=LARGEST)

    for row in range(3):
        x, v = latents[row].double(), velocity[row].double()
        s, n = SIGMA[row].double(), NEXT[row].double()
        if kind == "sde":
            spread = 0.7 * math.sqrt(s / (1 - (LARGEST if s == 1 else s)))
            mean = x * (1 + spread**2 / (2 * s) * (n - s))
            mean = mean + v * (1 + spread**2 * (1 - s) / (2 * s)) * (n - s)
            std = spread * math.sqrt(s - n)
        else:
            std = n * math.sin(0.35 * math.pi)
            mean = (1 - n) * (x - s * v) + torch.sqrt(n**2 - std**2) * (x + (1 - s) * v)
        expected = Normal(mean, std).log_prob(value[row].double()).mean()
        if kind == "cps":
            expected = -((value[row].double() - mean) ** 2).mean()
        assert found.log_prob(value)[row].double() == pytest.approx(expected.item(), rel=1e-5)


def test_kl_is_that_of_normal_distributions():
    one, other = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(k)) for k in range(2))
    std = torch.tensor([0.1, 0.5, 2.0])

    found = Gaussian(one, std).kl(Gaussian(other, std))

    spread = std.view(-1, 1, 1, 1).expand(SHAPE)
    expected = kl_divergence(Normal(one, spread), Normal(other, spread)).flatten(1).mean(-1)
    assert torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sampled_has_the_density_of_its_noise(drawn, kind):
    latents, velocity, _, noise = drawn
    found = step(latents, velocity, SIGMA, NEXT, noise_level=0.5, kind=kind, largest=LARGEST)

    value = found.sample(noise)

    std = found.std.view(-1, 1, 1, 1)
    density = -(noise**2) / 2 - torch.log(std) - 0.5 * math.log(2 * math.pi)
    if kind == "cps":
        density = -((std * noise) ** 2)
    assert torch.allclose(found.log_prob(value), density.flatten(1).mean(-1), atol=1e-4)


def test_the_same_change_of_the_mean_counts_alike_at_every_step_of_cps():
    """SD3's last noisy step would have 735 times the log-ratio of its first, by the deviations alone."""
    sigmas = torch.tensor([1.0, 0.954, 0.899, 0.833, 0.75, 0.643, 0.5, 0.3, 0.0089])
    latents, *velocities = torch.randn(3, 8, 4, 8, 8, generator=torch.Generator().manual_seed(0))

    one, other = (
        step(latents, velocity, sigmas[:-1], sigmas[1:], noise_level=0.7, kind="cps")
        for velocity in velocities
    )

    squares = ((one.mean - other.mean) ** 2).flatten(1).mean(-1)
    assert torch.equal(one.kl(other), squares)
    assert torch.allclose(one.log_prob(other.mean), -squares)
