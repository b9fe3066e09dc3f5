# SPDX-License-Identifier: Apache-2.0
"""Measured host memory of the first of two ranks while a model starts."""

import json
import os
import unittest.mock
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.distributed import run_distributed
from tests.helpers.memory import OWN, PAGES_OF_ITS_OWN, resident, watching_peak
from verl.config.model import FSDPConfig, ModelConfig
from verl.distributed.fsdp import make_mesh, sharded_parameters
from verl.models.tiny import WEIGHTS, save_tiny_model
from verl.utils.weight_files import save_weights
from verl.workers.model_builder import build_model

RANKS = 2


def save_as_published(folder: Path, family: str, **fields: Any) -> Path:
    """Write a random model of these sizes whose weights are stored in bfloat16."""
    save_tiny_model(folder, family, **fields)
    save_weights(
        {name: each.bfloat16() for name, each in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def measure_start(model: ModelConfig, fsdp: FSDPConfig, tiny: Path) -> tuple[int, int]:
    """Return the first rank's peak above its shard while two ranks start, and its shard, in bytes.

    `tiny` is a model of the same type, read first.
    """
    threshold = {"MALLOC_MMAP_THRESHOLD_": str(PAGES_OF_ITS_OWN)}
    with unittest.mock.patch.dict(os.environ, threshold):
        return run_distributed(_measure_start, RANKS, model, fsdp, tiny, timeout_s=1500, method="spawn")[0]


def _measure_start(
    rank: int, world_size: int, model: ModelConfig, fsdp: FSDPConfig, tiny: Path
) -> tuple[int, int]:
    to_empty, mesh = nn.Module.to_empty, make_mesh(world_size, -1, "cpu")

    @torch.no_grad()
    def to_zeros(self: nn.Module, **options: Any) -> nn.Module:
        for param in to_empty(self, **options).parameters():
            param.zero_()  # pages that nothing was written to would not count
        return self

    build_model(replace(model, model_path=str(tiny)), fsdp, mesh=mesh, device="cpu", trainable=True)
    before = resident(OWN)
    with unittest.mock.patch.object(nn.Module, "to_empty", to_zeros), watching_peak("cpu") as seen:
        built = build_model(model, fsdp, mesh=mesh, device="cpu", trainable=True)
    held = sharded_parameters(built).values()
    shard = sum(param.to_local().nbytes for param in held if isinstance(param, DTensor))
    return max(seen) - before - shard, shard
