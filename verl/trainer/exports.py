# SPDX-License-Identifier: Apache-2.0
"""A run that starts from a checkpoint of this project: its weights are exported before a device is taken."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from verl.checkpoint.legacy_shards import find_shard_files
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.sharded import HUGGINGFACE
from verl.config.model import ModelConfig
from verl.utils.rank_logger import get_logger

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # the last file of an export is one of them

logger = get_logger(__name__)


def export_checkpoints(worker: Any) -> None:
    """Write the weights of every checkpoint that a model of the run starts from, unless they are there.

    Args:
        worker: The section of that name: each role has a `model`.

    Raises:
        FileNotFoundError: A file of a checkpoint is missing.
        ValueError: A file is damaged.
    """
    for model in _models(worker):
        folder = Path(model.model_path or "")
        if is_unexported(folder):
            logger.info("a checkpoint is exported, once: path=%s", folder)
            merge_checkpoint(folder.parent, trust_remote_code=model.trust_remote_code)


def is_unexported(folder: Path) -> bool:
    """Whether a folder is the `huggingface` of a checkpoint, and weights are still to be written into it."""
    if folder.name != HUGGINGFACE or any((folder / name).is_file() for name in WEIGHTS):
        return False
    return (folder.parent / MANIFEST).is_file() or bool(find_shard_files(folder.parent))


def _models(worker: Any) -> Iterator[ModelConfig]:
    for entry in fields(worker):
        model = getattr(getattr(worker, entry.name), "model", None)
        if isinstance(model, ModelConfig):
            yield model
