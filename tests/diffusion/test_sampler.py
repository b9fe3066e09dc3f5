# SPDX-License-Identifier: Apache-2.0
"""Sampling: without noise that of diffusers, with noise of the policy whose log-probs it returns."""

import pytest
import torch

from tests.diffusion.models import LENGTH, PROMPTS, SIZE, STEPS, draw, generators, noise
from verl.diffusion.prompts import PromptEncoder
from verl.diffusion.sampler import NoiseSchedule, sample
from verl.diffusion.sde import KINDS
from verl.diffusion.step_forward import StepForward

CPU = torch.device("cpu")


def policy_of(model, scale, prompts=PROMPTS):
    """Return the guided velocity for the prompts, and the schedule of sampling without noise."""
    family, pipeline = model
    schedule = NoiseSchedule(*family.times(pipeline, STEPS, SIZE), 0.7, "sde", noisy=())
    encoder = PromptEncoder(family, pipeline, CPU, LENGTH)
    forward = StepForward(family, pipeline.transformer, schedule, encoder, guidance=scale)
    conditions = forward.conditions(prompts)
    return lambda latents, times: forward.velocity(latents, times, conditions), schedule


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_without_noise_images_are_those_of_diffusers(model, scale):
    family, pipeline = model
    velocity, schedule = policy_of(model, scale)

    found = sample(velocity, noise(model), schedule, generators())

    expected = draw(model, scale=scale, latent=True)
    assert (found.latents[:, -1] - expected).abs().max() < 1e-6 * expected.abs().max()
    assert not found.log_probs.any()
    assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas) and schedule.sigmas[0] == 1
    assert torch.equal(schedule.times, pipeline.scheduler.timesteps)
    images = family.decode(pipeline.vae, expected)
    assert images.shape == (2, 3, SIZE.height, SIZE.width)
    assert (images - draw(model, scale=scale)).abs().max() < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_a_prediction_does_not_depend_on_the_rest_of_the_batch(model, scale):
    prompts = ["red", "a red picture of the dark wall", "the color blue"]
    latents, times = noise(model, rows=3), torch.tensor([987.3, 303.7, 20.0])

    together = policy_of(model, scale, prompts)[0](latents, times)

    for row, prompt in enumerate(prompts):
        alone = policy_of(model, scale, [prompt])[0](latents[row : row + 1], times[row : row + 1])
        # guidance adds up `scale` and `1 - scale` times a prediction, and their rounding
        assert (together[row] - alone[0]).abs().max() < (2 * scale - 1) * 1e-6 * alone.abs().max(), prompt


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_the_steps_that_were_taken(model, kind):
    velocity, schedule = policy_of(model, 4.5)
    noisy = NoiseSchedule(schedule.sigmas, schedule.times, 0.7, kind, noisy=(1, 2))

    found = sample(velocity, noise(model), noisy, generators())

    for number in range(STEPS):
        before, after = found.latents[:, number], found.latents[:, number + 1]
        with torch.no_grad():
            gaussian = noisy.after(
                torch.full((2,), number), before, velocity(before, schedule.times[number].expand(2))
            )
        if number in noisy.noisy:
            assert torch.equal(gaussian.log_prob(after), found.log_probs[:, number])
        else:
            assert torch.equal(gaussian.mean, after) and not found.log_probs[:, number].any()


def test_a_row_depends_on_its_own_generator_alone(sd3):
    velocity, schedule = policy_of(sd3, 1.0)
    noisy = NoiseSchedule(schedule.sigmas, schedule.times, 0.7, "sde", noisy=(0, 1, 2, 3))
    first, second = generators()

    both = sample(velocity, noise(sd3), noisy, [first, second])
    other = sample(velocity, noise(sd3), noisy, [torch.Generator().manual_seed(9), generators()[1]])

    assert (both.latents[0] - other.latents[0]).abs().max() > 0.1
    assert torch.equal(both.latents[1], other.latents[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_to_a_reference_is_that_of_each_noisy_step(sd3, kind):
    velocity, schedule = policy_of(sd3, 1.0)
    noisy = NoiseSchedule(schedule.sigmas, schedule.times, 0.7, kind, noisy=(1, 2))

    found = sample(velocity, noise(sd3), noisy, generators(), lambda *inputs: 0.9 * velocity(*inputs))

    with torch.no_grad():
        for number in noisy.noisy:
            numbers, before = torch.full((2,), number), found.latents[:, number]
            predicted = velocity(before, schedule.times[number].expand(2))
            own, other = (noisy.after(numbers, before, scale * predicted) for scale in (1.0, 0.9))
            scale = 1 if kind == "cps" else 2 * own.std[:, None, None, None] ** 2
            expected = ((own.mean - other.mean) ** 2 / scale).mean((1, 2, 3))
            torch.testing.assert_close(found.kl[:, number], expected)
            assert (expected > 0).all()
    assert not found.kl[:, [0, *range(3, STEPS)]].any()
