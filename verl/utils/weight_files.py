# SPDX-License-Identifier: Apache-2.0
"""Weights as safetensors files."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_weights(
    tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file that others may read as far as the umask allows; those of safetensors are private.

    `metadata` is written into its header.
    """
    file.unlink(missing_ok=True)
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata={"format": "pt", **(metadata or {})})
    file.chmod(mode)


def share_weights(folder: Path, example: str = "config.json") -> None:
    """Let others read the weights that another library wrote into a folder as they may read its `example`."""
    mode = (folder / example).stat().st_mode
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


def by_folder(
    tensors: Iterable[tuple[str, Tensor]], folders: Sequence[str]
) -> Iterator[tuple[str, Iterator[tuple[str, Tensor]]]]:
    """Yield the folder of each run of tensors, and these by their names in it.

    Without `folders` all of them are in the model's own; else a name begins with that of its folder.
    """
    if not folders:
        yield "", iter(tensors)
        return

    def folder_of(named: tuple[str, Tensor]) -> str:
        first = named[0].partition(".")[0]
        return first if first in folders else ""  # a score is next to them

    for folder, part in itertools.groupby(tensors, folder_of):
        start = f"{folder}." if folder else ""
        yield folder, ((name.removeprefix(start), tensor) for name, tensor in part)
