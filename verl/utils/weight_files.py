# SPDX-License-Identifier: Apache-2.0
"""Weights as safetensors files."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_weights(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a file that others may read as far as the umask allows; those of safetensors are private."""
    file.unlink(missing_ok=True)
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(mode)
