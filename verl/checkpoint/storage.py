# SPDX-License-Identifier: Apache-2.0
"""Reading sharded tensors (torch.distributed.checkpoint) without trusting their files.

Nothing is unpickled but tensors and the few classes that describe them.
"""

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
            assert isinstance(entry, TensorStorageMetadata), f"a snapshot holds tensors only, not {key}"
            tensors[key] = entry
        return tensors


def load_metadata(file: IO[bytes], path: Path) -> Metadata:
    """Unpickle a metadata file."""
    try:
        return _MetadataUnpickler(file).load()
    except Exception as error:  # damaged bytes make the unpickler raise whatever it likes
        raise ValueError(f"{path} cannot be read ({error}): {remedy(path.parent)}") from error


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
