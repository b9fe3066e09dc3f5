# SPDX-License-Identifier: Apache-2.0
"""A folder of sharded tensors (torch.distributed.checkpoint) that says whether it is whole.

`manifest.json` is written last and lists every file with its size, so a folder that was cut off is known
before a tensor is read. Nothing is unpickled but tensors and the few classes that describe them.
"""

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

MANIFEST = "manifest.json"
REMEDY = "go on from another step with `trainer.load_checkpoint_path=…/global_step_N`"

# What torch.distributed.checkpoint writes into its metadata file, as (module, name).
METADATA_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Reads checkpoint metadata and refuses to build anything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in METADATA_CLASSES:
            raise pickle.UnpicklingError(f"checkpoint metadata must not hold {module}.{name}")
        return super().find_class(module, name)


class ShardReader(FileSystemReader):
    """Reads shards; the metadata once, and only the classes that belong there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds."""
        if self._metadata is None:
            path = Path(self.path) / ".metadata"
            with path.open("rb") as file:
                self._metadata = load_metadata(file, path)
        return self._metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Size and dtype of every tensor, by key."""
        tensors = {}
        for key, entry in self.read_metadata().state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), f"`save_shards` writes tensors only, not {key}"
            tensors[key] = entry
        return tensors


def load_metadata(file: IO[bytes], path: Path) -> Metadata:
    """Unpickle a metadata file."""
    try:
        return _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {REMEDY}") from error


def read_tensors(reader: ShardReader, into: dict[str, Tensor], *, is_alone: bool = False) -> None:
    """Fill tensors, sharded or not, in place.

    Args:
        reader: Of the folder.
        into: Tensors by key; each rank's DTensors receive its part.
        is_alone: True without a process group; otherwise every rank calls.
    """
    with warnings.catch_warnings():
        if is_alone:  # torch wonders whether a process group was forgotten
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        state_dict_loader.load(into, storage_reader=reader, no_dist=is_alone)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the list of files, and `content`, as the last file of a folder; it appears whole or not."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    write_json(folder / MANIFEST, content | {"files": sizes})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest and check that every file has the size it had when it was written.

    Raises:
        FileNotFoundError: There is no folder or no manifest, or a file is missing.
        ValueError: A file has another size.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint folder {folder}: {REMEDY}")
    path = folder / MANIFEST
    if not path.is_file():
        foreign = next(folder.glob("model_world_size_*_rank_*.pt"), None)
        if foreign is not None:
            raise FileNotFoundError(
                f"{folder} was written by another trainer ({foreign.name}): run"
                f" `python3 scripts/model_merger.py --local_dir {folder}` and start from"
                f" `worker.actor.model.model_path={folder / 'huggingface'}`"
            )
        raise FileNotFoundError(f"{path} is missing, so the checkpoint is not complete: {REMEDY}")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{path} cannot be read ({error}), it is damaged: {REMEDY}") from error
    for name, size in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: {REMEDY}")
        if file.stat().st_size != size:
            raise ValueError(
                f"{file} has {file.stat().st_size} bytes instead of {size}, it is damaged: {REMEDY}"
            )
    return manifest


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file in one move: readers see the old file or the new one."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
