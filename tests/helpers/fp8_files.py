# SPDX-License-Identifier: Apache-2.0
"""Models whose weights are written in FP8, as DeepSeek-V3 and Qwen3 are released."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl.models.tiny import WEIGHTS

LINEAR = re.compile(r"_(proj|with_mqa)\.weight$")  # not the embeddings, the head or routers


def save_in_fp8(
    folder: Path, block: tuple[int, int] | None = (128, 128), scales: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Write a saved model's linear weights again, in FP8; return what all weights stand for, by hub name.

    Without `block` a weight has one scale.
    """
    written, values = {}, {}
    for name, weight in load_file(folder / WEIGHTS).items():
        written[name] = values[name] = weight
        if LINEAR.search(name):
            rows, columns = block or weight.shape
            parts = [strip.split(columns, dim=1) for strip in weight.float().split(rows)]
            largest = torch.stack([torch.stack([part.abs().max() for part in strip]) for strip in parts])
            found = (largest / 448).to(scales)
            stored = [
                [(part / scale).to(torch.float8_e4m3fn) for part, scale in zip(*pair, strict=True)]
                for pair in zip(parts, found.float(), strict=True)
            ]
            whole = [
                torch.cat([part.float() * scale for part, scale in zip(*pair, strict=True)], dim=1)
                for pair in zip(stored, found.float(), strict=True)
            ]
            bits = [torch.cat([part.view(torch.uint8) for part in strip], dim=1) for strip in stored]
            written[name] = torch.cat(bits).view(torch.float8_e4m3fn)
            written[f"{name}_scale_inv"] = found if block else found.reshape(())
            values[name] = torch.cat(whole)
    save_file(written, folder / WEIGHTS, metadata={"format": "pt"})
    set_quantization(
        folder, quant_method="fp8", fmt="e4m3", activation_scheme="dynamic",
        weight_block_size=None if block is None else list(block),
    )  # fmt: skip
    return values


def set_quantization(folder: Path, **options: Any) -> None:
    """Write `quantization_config` into a model's config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}))


def change_weights(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace tensors of a model's file; None removes one."""
    tensors = load_file(folder / WEIGHTS) | changes
    kept = {name: each for name, each in tensors.items() if each is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
