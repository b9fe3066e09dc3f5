# SPDX-License-Identifier: Apache-2.0
"""Tensors and files of a base model that training does not load, such as a head that drafts further tokens.

A merged model keeps them as they are, so that it has all parts of the model that it replaces.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from verl.checkpoint.manifest import BASE_MODEL, MANIFEST
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


def unread_tensors(
    local_dir: Path,  # a role's folder, whose manifest names the model that training started from
    starts: tuple[str, ...],  # of the tensors' names
    base_model: str | None = None,  # folder or hub name, if that model has moved since
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base model's tensors of these names; warn if its files are not there."""
    if not starts:
        return
    base = base_model or base_of(local_dir)
    folder = None if base is None else folder_of(base, "*.safetensors")
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    if not files:
        logger.warning(
            "tensors that training does not load (%s) are not exported, because the base model %s %s: give it"
            " as `--base_model` to keep them",
            ", ".join(f"{start}*" for start in starts),
            base or "",
            "is not on this machine" if folder is None else "has no safetensors files",
        )
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                if name.startswith(starts):
                    yield name, tensors.get_tensor(name)


def copy_unread_files(
    local_dir: Path, names: tuple[str, ...], target: Path, base_model: str | None = None
) -> None:
    """Copy the base model's files of these names to a merged model; arguments as for `unread_tensors`."""
    base = base_model or base_of(local_dir) if names else None
    folder = None if base is None else folder_of(base, *names)
    for name in names:
        if folder is not None and (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def base_of(local_dir: Path) -> str | None:
    """Return the folder or hub name of the model that training started from, if it is known."""
    manifest = local_dir / MANIFEST  # checkpoints of other trainers have none
    return json.loads(manifest.read_text()).get(BASE_MODEL) if manifest.is_file() else None


def folder_of(base: str, *patterns: str) -> Path | None:
    """Return the folder of a model, or of a hub model in the cache; None if it is not on this machine."""
    if Path(base).is_dir():
        return Path(base)
    try:
        return Path(snapshot_download(base, local_files_only=True, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None
