# SPDX-License-Identifier: Apache-2.0
"""Images of `AutoencoderKL`, the VAE of Stable Diffusion 3 and of Flux."""

from typing import Any

import torch
from torch import Tensor


def decode_images(vae: Any, latents: Tensor) -> Tensor:
    """Return images (B, 3, H, W) in [0, 1] of latents (B, C, h, w), one by one to bound memory."""
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    return in_unit_interval(torch.cat([vae.decode(one[None], return_dict=False)[0] for one in scaled]))


def in_unit_interval(pixels: Tensor) -> Tensor:
    """Return pixels of a VAE, from -1 to 1, in [0, 1] and float32."""
    return (pixels.float() / 2 + 0.5).clamp(0, 1)
