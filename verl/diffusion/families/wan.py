# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1, and 2.2 with one transformer (https://arxiv.org/abs/2503.20314): videos of a prompt."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl.diffusion.families.interface import Conditions, DiffusionFamily, Size, decode_videos
from verl.diffusion.video_ulysses import TokenLayers

NEARLY_ONE = 1 - 1e-5  # UniPC starts at 1 - 1e-6, because it takes the logarithm of 1 - sigma


class Wan(DiffusionFamily):
    """Videos of `num_frames` = 4 k + 1: the first frame has its own latent, and every four after it."""

    pipelines = ("WanPipeline",)
    makes = "videos"
    longest_prompt = 512
    # of Flow-GRPO: self-attention and attention to the prompt
    adapted = tuple(f"attn{number}.to_{part}" for number in (1, 2) for part in ("k", "out.0", "q", "v"))
    layers = TokenLayers(
        first="blocks.0", last="proj_out", attention="attn1", projected=("norm_q", "norm_k", "to_v"),
        out="to_out.0",
    )  # fmt: skip

    def encode(self, pipeline: Any, texts: Sequence[str], max_length: int) -> Conditions:
        states, _ = pipeline.encode_prompt(
            prompt=list(texts), do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        return {"encoder_hidden_states": states}

    def latent_shape(self, pipeline: Any, size: Size) -> tuple[int, ...]:
        time, space = pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial
        frames = (size.frames - 1) // time + 1
        return pipeline.transformer.config.in_channels, frames, size.height // space, size.width // space

    def size_step(self, pipeline: Any) -> int:
        return pipeline.vae_scale_factor_spatial * pipeline.transformer.config.patch_size[-1]

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        return decode_videos(vae, latents)

    def times(self, pipeline: Any, steps: int, size: Size) -> tuple[Tensor, Tensor]:
        sigmas, times = super().times(pipeline, steps, size)
        return torch.where(sigmas > NEARLY_ONE, torch.ones_like(sigmas), sigmas), times
