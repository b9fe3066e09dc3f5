# SPDX-License-Identifier: Apache-2.0
"""Wan: predictions, sampling without noise and decoded videos are those of its pipeline of diffusers."""

import pytest
import torch
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from examples.quickstart.tiny_pipelines import MEAN, STD
from verl.diffusion.families.interface import Size, guided
from verl.diffusion.families.registry import family_of
from verl.diffusion.sampler import NoiseSchedule, sample

PROMPTS = ["a red picture", "the color blue"]
SIZE, STEPS, LENGTH = Size(16, 32, 5), 5, 16
SHIFT = 3.0


@pytest.fixture
def wan(wan_folder):
    """The family, and the pipeline of diffusers."""
    pipeline = WanPipeline.from_pretrained(wan_folder)
    pipeline.set_progress_bar_config(disable=True)
    return family_of(wan_folder), pipeline


def noise(wan, seed=0):
    family, pipeline = wan
    shape = family.latent_shape(pipeline, SIZE)
    return torch.randn(len(PROMPTS), *shape, generator=torch.Generator().manual_seed(seed))


def draw(wan, scale=1.0, output_type="latent"):
    _, pipeline = wan
    return pipeline(
        PROMPTS, height=SIZE.height, width=SIZE.width, num_frames=SIZE.frames, num_inference_steps=STEPS,
        guidance_scale=scale, latents=noise(wan), max_sequence_length=LENGTH, output_type=output_type,
    ).frames  # fmt: skip


def sampled(wan, scale, kind="sde", noisy=()):
    family, pipeline = wan
    conditions = family.encode(pipeline, PROMPTS, LENGTH)
    unconditional = family.encode(pipeline, [""] * len(PROMPTS), LENGTH) if scale > 1 else None

    def velocity(latents, times):
        return guided(family, pipeline.transformer, latents, times, conditions, unconditional, scale)

    schedule = NoiseSchedule(*family.times(pipeline, STEPS, SIZE), 0.7, kind, noisy)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]
    return sample(velocity, noise(wan), schedule, generators)


def test_latents_are_a_quarter_of_the_frames_and_of_each_side(wan):
    family, pipeline = wan

    assert family.latent_shape(pipeline, Size(16, 32, 9)) == (4, 3, 4, 8)
    assert family.latent_shape(pipeline, Size(16, 32, 1)) == (4, 1, 4, 8)
    assert family.size_step(pipeline) == 8


# UniPC of the first order, without its corrector, is Euler's method.
EULER = {"solver_order": 1, "disable_corrector": list(range(STEPS))}


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT, **EULER
        ),
    ],
    ids=["FlowMatchEuler", "UniPC of the first order"],
)
def test_without_noise_latents_are_those_of_euler_steps_of_diffusers(wan, scheduler, scale):
    wan[1].scheduler = scheduler

    found = sampled(wan, scale)

    expected = draw(wan, scale)
    assert (found.latents[:, -1] - expected).abs().max() < 2e-6 * expected.abs().max()
    assert not found.log_probs.any()


def test_the_sigmas_of_unipc_start_at_1_and_are_else_its_own(wan):
    family, pipeline = wan
    scheduler = pipeline.scheduler

    sigmas, times = family.times(pipeline, STEPS, SIZE)

    assert isinstance(scheduler, UniPCMultistepScheduler)
    assert sigmas[0] == 1 and torch.equal(sigmas[1:], scheduler.sigmas[1:])
    straight = torch.linspace(1, 0.001, STEPS + 1)[:-1]
    torch.testing.assert_close(sigmas[:-1], SHIFT * straight / (1 + (SHIFT - 1) * straight))
    assert torch.equal(times, scheduler.timesteps.float())


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_the_first_step_of_unipc_has_a_bounded_deviation(wan, kind):
    found = sampled(wan, 1.0, kind, noisy=(0, 1))

    assert found.latents.abs().max() < 100
    assert found.log_probs[:, :2].isfinite().all() and found.log_probs[:, :2].any()


def test_the_decoded_video_is_that_of_the_pipeline(wan):
    wan[1].scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    family, pipeline = wan

    with torch.no_grad():
        found = family.decode(pipeline.vae, draw(wan))

    assert found.shape == (2, 5, 3, 16, 32)
    torch.testing.assert_close(found, draw(wan, output_type="pt"), atol=1e-6, rtol=0)


def test_videos_that_are_decoded_one_by_one_are_those_of_a_batch(wan):
    family, pipeline = wan
    latents = noise(wan)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (MEAN, STD))

    with torch.no_grad():
        found = family.decode(pipeline.vae, latents)
        expected = pipeline.vae.decode(latents * std + mean, return_dict=False)[0]

    torch.testing.assert_close(found.transpose(1, 2), expected / 2 + 0.5, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("latent", "color"),
    [([1, -1, -1, 1], [1, 0, 0]), ([3, 3, -3, 3], [1, 1, 0]), ([0, 0, 0, 2], [0.5, 0.5, 0.5])],
)
def test_each_latent_of_the_tiny_model_paints_the_frames_of_its_own(wan, latent, color):
    """The first latent is of the first frame, the second one of the four after it."""
    family, pipeline = wan
    both = torch.tensor([latent, [-1, -1, 1, 1]], dtype=torch.float32).T  # (4, 2)
    mean, std = (torch.tensor(values)[:, None] for values in (MEAN, STD))
    latents = ((both - mean) / std).view(1, 4, 2, 1, 1).expand(1, 4, 2, 4, 4)

    with torch.no_grad():
        (video,) = family.decode(pipeline.vae, latents)

    frames = torch.tensor([color] + 4 * [[0, 0, 1]], dtype=torch.float32).view(5, 3, 1, 1)
    torch.testing.assert_close(video, frames.expand(5, 3, 16, 16), atol=1e-4, rtol=0)


def test_a_prediction_depends_on_its_own_row_alone(wan):
    family, pipeline = wan
    conditions = family.encode(pipeline, PROMPTS, LENGTH)
    times = torch.tensor([900.0, 300.0])

    with torch.no_grad():
        both = family.predict(pipeline.transformer, noise(wan), times, conditions)
        alone = [
            family.predict(
                pipeline.transformer, noise(wan)[row : row + 1], times[row : row + 1],
                {name: values[row : row + 1] for name, values in conditions.items()},
            )
            for row in range(2)
        ]  # fmt: skip

    torch.testing.assert_close(torch.cat(alone), both, atol=1e-6, rtol=1e-6)
    assert (both[0] - both[1]).abs().max() > 0.01
