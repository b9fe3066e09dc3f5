# SPDX-License-Identifier: Apache-2.0
"""Reader of torch.distributed.checkpoint shards that unpickles nothing but tensors and their metadata."""

import enum
import pickle
import warnings
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from verl.checkpoint.manifest import remedy

# Classes in the metadata files of torch.distributed.checkpoint, as (module, name).
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
    """Unpickler of checkpoint metadata that refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle enum members by it
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in METADATA_CLASSES:
            raise pickle.UnpicklingError(f"checkpoint metadata must not hold {module}.{name}")
        return super().find_class(module, name)


def _enum_member(owner: Any, name: str) -> Any:
    if not isinstance(owner, enum.EnumType):
        raise pickle.UnpicklingError(f"checkpoint metadata must not hold an attribute of {owner!r}")
    return owner[name]


class ShardReader(FileSystemReader):
    """Reader of shards that reads the metadata once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            path = Path(self.path) / ".metadata"
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing: {remedy(path.parent)}")
            with path.open("rb") as file:
                self._metadata = load_metadata(file, path)
        return self._metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return size and dtype of every tensor, by key."""
        tensors = {}
        for key, entry in self.read_metadata().state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                folder = Path(self.path)
                raise ValueError(f"{folder} holds {key}, which is not a tensor: {remedy(folder)}")
            tensors[key] = entry
        return tensors


def load_metadata(file: IO[bytes], path: Path) -> Metadata:
    try:
        metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        return metadata
    except Exception as error:  # damaged bytes make the unpickler raise almost anything
        raise ValueError(f"{path} cannot be read ({error}): {remedy(path.parent)}") from error


def read_tensors(
    reader: ShardReader,
    into: dict[str, Tensor],
    *,
    is_alone: bool = False,  # without a process group; otherwise every rank must call
) -> None:
    """Fill tensors, sharded or not, in place."""
    with warnings.catch_warnings():
        if is_alone:  # torch warns that a process group may be missing
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        state_dict_loader.load(into, storage_reader=reader, no_dist=is_alone)
