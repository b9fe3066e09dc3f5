# SPDX-License-Identifier: Apache-2.0
"""Families with tokens of 2 x 2 latents, and a schedule that depends on their number.

Latents are unpacked, (B, C, h, w), everywhere but in the transformer.
"""

from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from verl.diffusion.families.interface import DiffusionFamily, Size

PATCH = 2  # latents of a token, in height and in width
TIMES = 1000  # of the scheduler; the transformer reads them from 0 to 1


class PackedFamily(DiffusionFamily):
    """Images whose latents are packed for the transformer."""

    def latent_shape(self, pipeline: Any, size: Size) -> tuple[int, ...]:
        factor = pipeline.vae_scale_factor
        channels = pipeline.transformer.config.in_channels // PATCH**2
        return channels, size.height // factor, size.width // factor

    def size_step(self, pipeline: Any) -> int:
        return pipeline.vae_scale_factor * PATCH

    def times(self, pipeline: Any, steps: int, size: Size) -> tuple[Tensor, Tensor]:
        """Return the steps of `DiffusionFamily.times`: even ones, shifted towards noise in large images."""
        scheduler = pipeline.scheduler
        tokens = (size.height // self.size_step(pipeline)) * (size.width // self.size_step(pipeline))
        even = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(sigmas=even, mu=shift_of(scheduler.config, tokens))
        return scheduler.sigmas.float(), scheduler.timesteps.float()


def shift_of(config: Any, tokens: int) -> float:
    """Return the shift of a scheduler's times for an image: linear in the number of its tokens.

    Source: https://github.com/black-forest-labs/flux, `get_lin_function`. Schedulers without
    `use_dynamic_shifting` ignore it.
    """
    few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return low + (high - low) * (tokens - few) / (many - few)


def pack(latents: Tensor) -> Tensor:
    """Return latents (B, C, h, w) as tokens (B, h w / 4, 4 C), row by row."""
    return F.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2).contiguous()


def unpack(tokens: Tensor, like: Tensor) -> Tensor:
    """Return tokens (B, h w / 4, 4 C) as latents (B, C, h, w), the shape of `like`."""
    height, width = like.shape[-2:]
    squares = tokens.transpose(1, 2).unflatten(2, (height // PATCH, width // PATCH))
    return F.pixel_shuffle(squares, PATCH)
