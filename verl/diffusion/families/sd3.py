# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 and 3.5 (https://arxiv.org/abs/2403.03206): CLIP twice, T5, and a joint transformer."""

from collections.abc import Sequence
from typing import Any

from verl.diffusion.families.interface import JOINT_ATTENTION, Conditions, DiffusionFamily, Size


class SD3(DiffusionFamily):
    """Images of one latent of 16 channels, an eighth of their size."""

    pipelines = ("StableDiffusion3Pipeline",)
    longest_prompt = 256
    adapted = JOINT_ATTENTION  # as in Flow-GRPO

    def encode(self, pipeline: Any, texts: Sequence[str], max_length: int) -> Conditions:
        states, _, pooled, _ = pipeline.encode_prompt(
            prompt=list(texts), prompt_2=None, prompt_3=None, do_classifier_free_guidance=False,
            max_sequence_length=max_length,
        )  # fmt: skip
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def latent_shape(self, pipeline: Any, size: Size) -> tuple[int, ...]:
        factor = pipeline.vae_scale_factor
        return pipeline.transformer.config.in_channels, size.height // factor, size.width // factor

    def size_step(self, pipeline: Any) -> int:
        return pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
