# SPDX-License-Identifier: Apache-2.0
"""Measured host memory of two ranks while a pipeline of diffusers starts, and once its frozen models ran."""

import gc
import os
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from examples.quickstart import tiny_pipelines as tiny
from tests.diffusion.training import build
from tests.helpers.distributed import run_distributed
from tests.helpers.memory import OWN, PAGES_OF_ITS_OWN, resident, watching_peak
from verl.config.model import LoraConfig
from verl.diffusion import frozen_parts
from verl.diffusion.model import DiffusionModel
from verl.distributed.fsdp import sharded_parameters

RANKS = 2
MIB = 1 << 20
HEADS, HEAD_DIM, LAYERS = 8, 64, 8  # of the transformer: 52 million weights


class Start(NamedTuple):
    """Bytes of a rank that are not pages of files; those after the first are above its shard."""

    shard: int
    peak: int  # while it starts
    held: int  # once it has
    used: int  # after text encoders and VAE have been on the device


def save_larger_sd3(folder: Path, stored: torch.dtype) -> Path:
    """Save a Stable Diffusion 3 of 120 million weights, most of them in the transformer and in T5."""

    @tiny.saved
    def save() -> Any:
        hidden = HEADS * HEAD_DIM
        transformer = tiny.parts.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=tiny.LATENTS, num_layers=LAYERS,
            attention_head_dim=HEAD_DIM, num_attention_heads=HEADS, joint_attention_dim=2 * tiny.WIDTH,
            caption_projection_dim=hidden, pooled_projection_dim=2 * tiny.WIDTH, out_channels=tiny.LATENTS,
            pos_embed_max_size=32, qk_norm="rms_norm",
        )  # fmt: skip
        sizes = tiny.t5_options() | {"d_ff": 1 << 14, "num_layers": 32}
        return tiny.parts.StableDiffusion3Pipeline(
            transformer=transformer.to(stored),
            scheduler=tiny.parts.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=tiny.kl_vae(),
            text_encoder=tiny.texts.CLIPTextModelWithProjection(tiny.clip_config()),
            tokenizer=tiny.clip_tokenizer(),
            text_encoder_2=tiny.texts.CLIPTextModelWithProjection(tiny.clip_config()),
            tokenizer_2=tiny.clip_tokenizer(),
            text_encoder_3=tiny.texts.T5EncoderModel(tiny.texts.T5Config(**sizes)).to(stored),
            tokenizer_3=tiny.t5_tokenizer(),
        )  # fmt: skip

    return save(folder)


def measure_picture_starts(folder: Path, tiny_folder: Path, loras: Sequence[LoraConfig]) -> list[list[Start]]:
    """Return the starts of each of two ranks; `tiny_folder` has the same kind of pipeline, read first."""
    threshold = {"MALLOC_MMAP_THRESHOLD_": str(PAGES_OF_ITS_OWN)}
    with unittest.mock.patch.dict(os.environ, threshold):
        return run_distributed(_measure, RANKS, folder, tiny_folder, loras, method="spawn")


def _measure(
    rank: int, world_size: int, folder: Path, tiny_folder: Path, loras: Sequence[LoraConfig]
) -> list[Start]:
    frozen_parts.is_gpu = lambda device: True  # frozen models wait in their files
    return [_measure_one(folder, tiny_folder, lora, world_size) for lora in loras]


def _measure_one(folder: Path, tiny_folder: Path, lora: LoraConfig, world_size: int) -> Start:
    _start(tiny_folder, lora, world_size)
    gc.collect()
    before = resident(OWN)
    with watching_peak("cpu") as seen:
        policy = _start(folder, lora, world_size)
    params = sharded_parameters(policy.model).values()
    shard = sum(param.to_local().nbytes for param in params if isinstance(param, DTensor))
    held = resident(OWN)
    for parts in (policy.text_encoders, policy.vae):
        with parts.loaded():
            pass
    return Start(shard, max(seen) - before - shard, held - before - shard, resident(OWN) - before - shard)


def _start(folder: Path, lora: LoraConfig, world_size: int) -> DiffusionModel:
    to_empty = nn.Module.to_empty

    @torch.no_grad()
    def to_zeros(self: nn.Module, **options: Any) -> nn.Module:
        for param in to_empty(self, **options).parameters():
            param.zero_()  # pages that nothing was written to would not count
        return self

    kept_in = "bf16" if lora.is_used else "fp32"
    with unittest.mock.patch.object(nn.Module, "to_empty", to_zeros):
        return build(folder, lora, world_size, torch_dtype=kept_in, computes_in="bf16")
