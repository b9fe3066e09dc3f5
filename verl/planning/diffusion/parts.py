# SPDX-License-Identifier: Apache-2.0
"""The models of a diffusers folder on the meta device, from their configs alone; no weights are read."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.config.files.model_files import PIPELINE

CONFIG = "config.json"
TRANSFORMER, VAE = "transformer", "vae"


def model_names(folder: Path) -> Iterator[str]:
    """Yield the names of a pipeline's models: `transformer`, `vae`, `text_encoder` and so on."""
    for name, entry in index_of(folder).items():
        if isinstance(entry, list) and None not in entry and (folder / name / CONFIG).is_file():
            yield name


def meta_part(folder: Path, name: str) -> nn.Module:
    """Build a model of a pipeline without memory."""
    library, kind = index_of(folder)[name]
    cls: Any = getattr(importlib.import_module(library), kind)
    with torch.device("meta"):
        if library == "diffusers":
            return cls.from_config(cls.load_config(folder / name))
        return cls(cls.config_class.from_pretrained(folder / name))


def num_bytes(module: nn.Module, number: int) -> int:
    """Return the bytes of weights and buffers of `number` bytes each."""
    return number * sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


def index_of(folder: Path) -> dict[str, Any]:
    """Read the classes of a pipeline's parts."""
    return json.loads((folder / PIPELINE).read_text(encoding="utf-8"))
