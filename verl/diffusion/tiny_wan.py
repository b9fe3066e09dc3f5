# SPDX-License-Identifier: Apache-2.0
"""A tiny Wan with random weights and all of its parts, for tests and demos."""

from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from verl.diffusion.tiny import LATENTS, WIDTH, set_layer, t5_tokenizer
from verl.utils.weight_files import share_weights

CHANNELS = 16  # of the VAE
MEAN, STD = [0.1, -0.2, 0.3, 0.0], [1.5, 0.8, 1.2, 1.0]  # of latents
PATCH = (1, 2, 2)


def save_tiny_wan(folder: Path, *, seed: int = 0, layers: int = 2) -> Path:
    """Save a Wan whose VAE has a latent for 4 x 4 pixels of four frames; returns the folder.

    Its scheduler is that of Wan 2.1, UniPC with the sigmas of a flow.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        scheduler: Any = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
        pipeline = WanPipeline(
            transformer=WanTransformer3DModel(
                patch_size=PATCH, num_attention_heads=4, attention_head_dim=16, in_channels=LATENTS,
                out_channels=LATENTS, text_dim=2 * WIDTH, freq_dim=64, ffn_dim=128, num_layers=layers,
                rope_max_seq_len=32,
            ),
            scheduler=scheduler, vae=_vae(), text_encoder=_umt5(), tokenizer=t5_tokenizer(),
        )  # fmt: skip
    pipeline.save_pretrained(folder)
    share_weights(folder, "model_index.json")
    return folder


def _vae() -> AutoencoderKLWan:
    """Build a VAE whose decoder reaches every color, which random ones do not.

    It paints three of the four latent channels, divided by the root mean square of all at that point: its
    blocks pass on what they read, a latent gives four equal frames, and the last SiLU reads each channel and
    its negative, `silu(z) - silu(-z) = z`.
    """
    vae = AutoencoderKLWan(
        base_dim=CHANNELS, z_dim=LATENTS, dim_mult=[1, 1, 1], num_res_blocks=1,
        temperal_downsample=[True, True], latents_mean=MEAN, latents_std=STD,
        scale_factor_temporal=4, scale_factor_spatial=4,
    )  # fmt: skip
    half = CHANNELS // 2  # an upsampler halves the channels, and the next block has all again
    signed = torch.cat([torch.eye(LATENTS), -torch.eye(LATENTS)])  # (8, 4)
    whole = torch.eye(half).repeat(2, 1)  # (16, 8)
    decoder: Any = vae.decoder
    for name, module in decoder.named_modules():
        if name.endswith(("conv2", "proj")):
            set_layer(module, 0.0)  # of a residual branch
        elif name.endswith("conv_shortcut") and hasattr(module, "weight"):
            set_layer(module, _last(whole, 1, 1))
        elif name.endswith("resample.1"):
            set_layer(module, _last(torch.eye(half, CHANNELS), 1, 3)[:, :, 0])
        elif name.endswith("time_conv"):
            set_layer(module, _last(torch.eye(CHANNELS).repeat(2, 1), 3, 1))
    set_layer(vae.post_quant_conv, _last(torch.eye(LATENTS), 1, 1))
    set_layer(decoder.conv_in, _last(signed.repeat(2, 1), 3, 3))
    read = torch.cat([torch.eye(3, LATENTS), -torch.eye(3, LATENTS)], 1)  # (3, 8)
    set_layer(decoder.conv_out, _last(read.repeat(1, 2) / 2, 3, 3))
    return vae


def _last(matrix: Tensor, frames: int, size: int) -> Tensor:
    """Return a causal convolution (out, in, frames, size, size) that applies a matrix to each pixel."""
    kernel = matrix.new_zeros(*matrix.shape, frames, size, size)
    kernel[:, :, -1, size // 2, size // 2] = matrix
    return kernel


def _umt5() -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=len(t5_tokenizer()), d_model=2 * WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2
    )
    return UMT5EncoderModel(config)
