# SPDX-License-Identifier: Apache-2.0
"""The tiny models of tests, and how diffusers' own pipelines sample each of them."""

from functools import partial

import torch

from examples.quickstart.tiny_pipelines import save_tiny_sd3
from tests.diffusion.image_pipelines import save_tiny_flux, save_tiny_qwen_image
from verl.diffusion.families.interface import PackedFamily, Size, pack, unpack

MODELS = {
    "sd3": save_tiny_sd3,
    "flux": save_tiny_flux,
    "flux_schnell": partial(save_tiny_flux, schnell=True),
    "qwen_image": save_tiny_qwen_image,
}
PROMPTS = ["a red picture", "the color blue"]
SIZE, STEPS, LENGTH = Size(16, 24), 5, 16


def save(name, folder):
    return MODELS[name](folder)


def noise(model, seed=0, rows=2):
    family, pipeline = model
    shape = family.latent_shape(pipeline, SIZE)
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed))


def generators():
    return [torch.Generator().manual_seed(seed) for seed in (1, 2)]


def draw(model, prompts=PROMPTS, scale=1.0, *, latent=False):
    """Return the images, or the latents, of diffusers' pipeline for the noise of seed 0."""
    family, pipeline = model
    first = noise(model, rows=len(prompts))
    is_packed = isinstance(family, PackedFamily)
    found = pipeline(
        prompts, height=SIZE.height, width=SIZE.width, num_inference_steps=STEPS,
        latents=pack(first) if is_packed else first, max_sequence_length=LENGTH,
        output_type="latent" if latent else "pt", **_guidance(pipeline, prompts, scale),
    ).images  # fmt: skip
    return unpack(found, first) if latent and is_packed else found


def _guidance(pipeline, prompts, scale):
    if type(pipeline).__name__ == "QwenImagePipeline":
        return {"true_cfg_scale": scale, "negative_prompt": [" "] * len(prompts) if scale > 1 else None}
    return {"guidance_scale": scale}
