# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image (https://arxiv.org/abs/2508.02324): Qwen2.5-VL, and a transformer that reads its states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl.diffusion.families.interface import (
    JOINT_ATTENTION,
    PATCH,
    TIMES,
    Conditions,
    PackedFamily,
    decode_videos,
    pack,
    unpack,
)

TEMPLATE_END = 5  # tokens of the chat template after the prompt, which the transformer reads too
STATES, MASK = "encoder_hidden_states", "encoder_hidden_states_mask"


class QwenImage(PackedFamily):
    """Images of one latent of 16 channels, an eighth of their size; prompts keep their own length."""

    pipelines = ("QwenImagePipeline",)
    longest_prompt = 1024 - TEMPLATE_END
    unguided = " "  # as its authors recommend
    # as in Flow-GRPO: also the feed-forward layers of image and text
    adapted = (*JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")

    def encode(self, pipeline: Any, texts: Sequence[str], max_length: int) -> Conditions:
        """Encode prompts, padded to the longest of them."""
        states, mask = pipeline.encode_prompt(
            prompt=list(texts), device=pipeline.text_encoder.device,
            max_sequence_length=max_length + TEMPLATE_END,
        )  # fmt: skip
        mask = torch.ones_like(states[..., 0]) if mask is None else mask
        return {STATES: states, MASK: mask.bool()}

    def join(self, parts: Sequence[Conditions]) -> Conditions:
        rows = {name: [row for part in parts for row in part[name]] for name in parts[0]}
        return {name: pad_sequence(values, batch_first=True) for name, values in rows.items()}

    def predict(self, transformer: Any, latents: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
        shape = (1, latents.shape[-2] // PATCH, latents.shape[-1] // PATCH)
        (found,) = transformer(
            hidden_states=pack(latents), timestep=times / TIMES, img_shapes=[[shape]] * len(latents),
            **conditions, return_dict=False,
        )  # fmt: skip
        return unpack(found, latents)

    def guide(self, without: Tensor, with_prompt: Tensor, scale: float) -> Tensor:
        """Give the combination of `DiffusionFamily.guide` the length that tokens with the prompt have."""
        guided, wanted = pack(super().guide(without, with_prompt, scale)), pack(with_prompt)
        lengths = wanted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack(guided * lengths, without)

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Return images of latents, which the VAE decodes as videos of one frame."""
        return decode_videos(vae, latents[:, :, None])[:, 0]
