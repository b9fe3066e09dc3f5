# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of single models, written synchronously."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from verl.checkpoint.sharded import take_snapshot, write_snapshot


def save_shards(path, model, optimizer=None, scheduler=None, extra=None):
    """Take a snapshot and write it; every rank calls it."""
    write_snapshot(path, take_snapshot(model, optimizer, scheduler, extra))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's files, after the name of their folder if there are several."""
    file = folder / "model.safetensors"
    if file.is_file():
        return load_file(file)
    return {
        f"{file.parent.name}.{name}": tensor
        for file in folder.glob("*/model.safetensors")
        for name, tensor in load_file(file).items()
    }


def modes_of(folder: Path) -> dict[str, int]:
    """Return the permission bits of each file in a folder and those inside it, by its path."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.stat().st_mode & 0o777 for file in files}
