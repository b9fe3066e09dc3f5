# SPDX-License-Identifier: Apache-2.0
"""Packed latents are those of diffusers, and the shift of the schedule that of the number of tokens."""

import pytest
import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from verl.diffusion.families.interface import Size, pack, shift_of, unpack


def test_latents_are_packed_as_in_diffusers_and_unpacked_again():
    latents = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))

    tokens = pack(latents)

    assert tokens.shape == (2, 12, 16)
    assert torch.equal(tokens, FluxPipeline._pack_latents(latents, 2, 4, 6, 8))
    assert torch.equal(unpack(tokens, latents), latents)


def test_a_token_is_the_square_of_its_row_and_column():
    latents = torch.arange(16.0).view(1, 1, 4, 4)  # [[0 1 2 3], [4 5 6 7], ...]

    assert pack(latents)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@pytest.mark.parametrize(
    ("config", "tokens", "shift"),
    [
        ({}, 256, 0.5),
        ({}, 4096, 1.15),  # 1024 x 1024 pixels
        ({}, 1024, 0.5 + 0.65 * 768 / 3840),  # 512 x 512: 0.63
        # Qwen-Image
        (
            {"base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192},
            8192,
            0.9,
        ),
    ],
)
def test_the_shift_is_linear_in_the_number_of_tokens(config, tokens, shift):
    assert shift_of(config, tokens) == pytest.approx(shift)
    values = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    expected = calculate_shift(tokens, *values, config.get("base_shift", 0.5), config.get("max_shift", 1.15))
    assert shift_of(config, tokens) == pytest.approx(expected)


def test_larger_images_have_more_steps_with_much_noise(model):
    family, pipeline = model

    small, large = (family.times(pipeline, 4, Size(side, side))[0] for side in (16, 512))

    if pipeline.scheduler.config.use_dynamic_shifting:
        assert (large[1:3] > small[1:3]).all()
    else:
        assert torch.equal(small, large)
