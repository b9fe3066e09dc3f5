# SPDX-License-Identifier: Apache-2.0
"""Weights of an export as safetensors files of a bounded size, with an index if there are several."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from verl.utils.weight_files import save_weights

MAX_FILE_BYTES = 5 * 1024**3  # as hub checkpoints are cut


def cast(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Convert tensors of floating-point numbers; None keeps them."""
    for name, tensor in tensors:
        yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


@contextmanager
def writing(folders: Sequence[Path]) -> Iterator[None]:
    """Remove earlier weights from these folders, and partial files if the block fails."""
    try:
        for pattern in ("*.safetensors", "*.safetensors.index.json", "*.part"):
            for old in [file for folder in folders for file in folder.glob(pattern)]:
                old.unlink()
        yield
    except (OSError, SafetensorError) as error:
        for part in [file for folder in folders for file in folder.glob("*.part") if file.is_file()]:
            part.unlink()
        raise OSError(
            f"{folders[0]} cannot be written ({error}): it must be a folder of yours, with room for the"
            " weights"
        ) from error


def write_files(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_file_bytes: int, stem: str = "model"
) -> torch.dtype | None:
    """Write the weights into a folder; return the dtype of the first floating-point tensor.

    `stem` begins the names of the files.
    """
    folder.mkdir(exist_ok=True)
    files: list[list[str]] = []  # tensors of each file
    total, dtype = 0, None
    for batch in _batches(tensors, max_file_bytes):
        save_weights(batch, folder / f"{len(files)}.part")
        files.append(list(batch))
        total += sum(tensor.nbytes for tensor in batch.values())
        dtype = dtype or next((t.dtype for t in batch.values() if t.is_floating_point()), None)
        batch.clear()  # before the next one is read
    _name_parts(folder, stem, files, total)
    return dtype


def _batches(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    batch, size = {}, 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > max_bytes:
            yield batch
            batch, size = {}, 0
        # safetensors rejects views, and a view would keep its large base tensor alive.
        is_view = not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes
        batch[name] = tensor.clone(memory_format=torch.contiguous_format) if is_view else tensor
        size += tensor.nbytes
    yield batch


def _name_parts(folder: Path, stem: str, files: list[list[str]], total: int) -> None:
    count = len(files)  # part of the final names
    if count == 1:
        (folder / "0.part").rename(folder / f"{stem}.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(files):
        file = f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"
        (folder / f"{index}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(content, indent=2))
