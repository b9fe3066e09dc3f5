# SPDX-License-Identifier: Apache-2.0
"""Description of a family of diffusion models: its parts, how it reads a prompt and predicts a velocity.

Names of parts are those of a diffusers folder: `transformer`, `vae`, `text_encoder`, ...
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.diffusion.video_ulysses import TokenLayers

Conditions = Mapping[str, Tensor]  # what the transformer reads of prompts, (B, ...) by argument
GUIDANCE = "guidance"  # argument of transformers that read the scale
PATCH = 2  # latents of a packed token, in height and in width
TIMES = 1000  # of the scheduler; transformers of packed tokens read them from 0 to 1
# Ends of the names of layers of attention between image and text.
JOINT_ATTENTION = (
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
    "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """The size of what is made."""

    height: int  # pixels
    width: int
    frames: int = 1


class DiffusionFamily(ABC):
    """A kind of pipeline of diffusers whose transformer predicts velocities."""

    pipelines: ClassVar[tuple[str, ...]]  # names of its classes in `model_index.json`
    makes: ClassVar[str] = "images"  # or `videos`, as a reward function calls the result
    longest_prompt: ClassVar[int]  # tokens that its longest text encoder reads
    adapted: ClassVar[tuple[str, ...]]  # ends of the names of the modules that LoRA adapts by default
    reads_guidance: ClassVar[bool] = False  # the transformer reads the scale, and then predicts once
    unguided: ClassVar[str] = ""  # the prompt of predictions without a condition
    layers: ClassVar[TokenLayers | None] = None  # where ranks can divide its tokens; None: they cannot

    @abstractmethod
    def encode(self, pipeline: Any, texts: Sequence[str], max_length: int) -> Conditions:
        """Encode prompts with the text encoders of a pipeline, which needs no other part."""

    @abstractmethod
    def latent_shape(self, pipeline: Any, size: Size) -> tuple[int, ...]:
        """Return the shape of one latent, without the batch."""

    @abstractmethod
    def size_step(self, pipeline: Any) -> int:
        """Return the number of pixels that height and width must be multiples of."""

    def predict(self, transformer: Any, latents: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
        """Return velocities of latents (B, ...) at times (B,) of the scheduler."""
        return transformer(hidden_states=latents, timestep=times, **conditions, return_dict=False)[0]

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Return images (B, 3, H, W), or videos (B, F, 3, H, W), in [0, 1]; one by one to bound memory."""
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return in_unit_interval(torch.cat([vae.decode(one[None], return_dict=False)[0] for one in scaled]))

    def times(self, pipeline: Any, steps: int, size: Size) -> tuple[Tensor, Tensor]:
        """Return the scheduler's sigmas (steps + 1,), from 1 to 0, and its times (steps,), in float32."""
        scheduler = pipeline.scheduler
        scheduler.set_timesteps(steps)
        return scheduler.sigmas.float(), scheduler.timesteps.float()

    def join(self, parts: Sequence[Conditions]) -> Conditions:
        """Join the rows of batches of conditions, which may be of prompts of different lengths."""
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def guide(self, without: Tensor, with_prompt: Tensor, scale: float) -> Tensor:
        """Combine velocities (B, ...) without and with the prompt: Ho and Salimans 2022, equation 6."""
        return without + scale * (with_prompt - without)

    def predicts_twice(self, scale: float) -> bool:
        """Return whether guidance of this scale needs predictions without a prompt."""
        return scale > 1 and not self.reads_guidance


def guided(
    family: DiffusionFamily,
    transformer: Any,
    latents: Tensor,
    times: Tensor,
    conditions: Conditions,
    unconditional: Conditions | None,
    scale: float,
) -> Tensor:
    """Predict velocities with guidance: classifier-free, or by a transformer that reads the scale.

    Without `unconditional` one prediction is all. Both predictions are of one call.
    """
    if family.reads_guidance:
        conditions = {**conditions, GUIDANCE: torch.full_like(times, scale)}
    if unconditional is None:
        return family.predict(transformer, latents, times, conditions)
    both = family.join([unconditional, conditions])
    found = family.predict(transformer, torch.cat([latents] * 2), torch.cat([times] * 2), both)
    without, with_prompt = found.chunk(2)
    return family.guide(without, with_prompt, scale)


def decode_videos(vae: Any, latents: Tensor) -> Tensor:
    """Return videos (B, F, 3, H, W) in [0, 1] of latents (B, C, f, h, w), scaled by channel."""
    mean, std = (
        torch.tensor(values, dtype=vae.dtype, device=latents.device).view(-1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    scaled = latents.to(vae.dtype) * std + mean
    pixels = [vae.decode(one[None], return_dict=False)[0] for one in scaled]  # one by one: bounded memory
    return in_unit_interval(torch.cat(pixels)).transpose(1, 2)


def in_unit_interval(pixels: Tensor) -> Tensor:
    """Return pixels of a VAE, from -1 to 1, in [0, 1] and float32."""
    return (pixels.float() / 2 + 0.5).clamp(0, 1)


class PackedFamily(DiffusionFamily):
    """Images with tokens of 2 x 2 latents, and a schedule that depends on their number.

    Latents are unpacked, (B, C, h, w), everywhere but in the transformer.
    """

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
