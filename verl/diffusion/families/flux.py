# SPDX-License-Identifier: Apache-2.0
"""FLUX.1 (https://github.com/black-forest-labs/flux): CLIP, T5, and a transformer that reads the guidance."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl.diffusion.families.interface import (
    GUIDANCE,
    JOINT_ATTENTION,
    PATCH,
    TIMES,
    Conditions,
    PackedFamily,
    pack,
    unpack,
)


class Flux(PackedFamily):
    """Images of one latent of 16 channels, an eighth of their size.

    FLUX.1-dev was distilled from guided predictions and reads their scale; FLUX.1-schnell reads none.
    """

    pipelines = ("FluxPipeline",)
    longest_prompt = 512
    reads_guidance = True
    # as in Flow-GRPO: also the feed-forward layers where image and text are apart
    adapted = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

    def encode(self, pipeline: Any, texts: Sequence[str], max_length: int) -> Conditions:
        states, pooled, _ = pipeline.encode_prompt(
            prompt=list(texts), device=pipeline.text_encoder.device, max_sequence_length=max_length
        )
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def predict(self, transformer: Any, latents: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
        given = dict(conditions)
        if not transformer.config.guidance_embeds:
            given.pop(GUIDANCE, None)
        length = given["encoder_hidden_states"].shape[1]
        of_text = torch.zeros(length, 3, dtype=torch.long, device=latents.device)
        (found,) = transformer(
            hidden_states=pack(latents), timestep=times / TIMES, img_ids=_positions(latents), txt_ids=of_text,
            **given, return_dict=False,
        )  # fmt: skip
        return unpack(found, latents)


def _positions(latents: Tensor) -> Tensor:
    """Return the position of each token, (h w / 4, 3): 0, row, column."""
    rows, columns = (torch.arange(side // PATCH, device=latents.device) for side in latents.shape[-2:])
    return torch.cartesian_prod(rows.new_zeros(1), rows, columns)
