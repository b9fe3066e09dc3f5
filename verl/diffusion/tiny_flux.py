# SPDX-License-Identifier: Apache-2.0
"""A tiny FLUX.1, like those of `tiny`."""

from pathlib import Path

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import CLIPTextModel

from verl.diffusion.tiny import LATENTS, WIDTH, clip_config, clip_tokenizer, kl_vae, t5, t5_tokenizer
from verl.utils.weight_files import share_weights


def save_tiny_flux(folder: Path, *, seed: int = 0, layers: int = 1, schnell: bool = False) -> Path:
    """Save a FLUX.1-dev, or a FLUX.1-schnell, which reads no guidance; returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = FluxPipeline(
            transformer=FluxTransformer2DModel(
                in_channels=4 * LATENTS, num_layers=layers, num_single_layers=layers, attention_head_dim=16,
                num_attention_heads=4, joint_attention_dim=2 * WIDTH, pooled_projection_dim=WIDTH,
                guidance_embeds=not schnell, axes_dims_rope=(4, 6, 6),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=1.0 if schnell else 3.0, use_dynamic_shifting=not schnell
            ),
            vae=kl_vae(shift_factor=0.1, scaling_factor=0.4),
            text_encoder=CLIPTextModel(clip_config()), tokenizer=clip_tokenizer(),
            text_encoder_2=t5(), tokenizer_2=t5_tokenizer(),
        )  # fmt: skip
    pipeline.save_pretrained(folder)
    share_weights(folder, "model_index.json")
    return folder
