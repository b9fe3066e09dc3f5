# SPDX-License-Identifier: Apache-2.0
"""Manifests of checkpoint folders: the sizes and digests of all files, written last.

An interrupted folder has no manifest. Sizes are compared before a run starts, digests when it reads.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from verl.config.files.paths import MODEL_CONFIGS

MANIFEST = "manifest.json"
BASE_MODEL = "base_model"  # in a role's manifest: folder or hub name of the model that training started from
STATE_FILE = "trainer_state.json"  # of a step, written by the controller
ORIGIN = "origin"  # its entry for what the run is computed from, see `trainer/run/resuming.py`
STEP_FOLDER = re.compile(r"global_step_(\d{1,18})")


class FileEntry(TypedDict):
    """Size and digest of a file."""

    bytes: int
    sha256: str


def file_entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)} for name in names
    }


def write_manifest(folder: Path, content: dict[str, Any], files: dict[str, FileEntry] | None = None) -> None:
    """Write the manifest of a folder atomically: `content`, and the files, by default all that are there."""
    if files is None:
        files = file_entries(folder, sorted(file.name for file in folder.iterdir() if file.is_file()))
    write_json(folder / MANIFEST, content | {"files": files})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder and check the sizes of its files."""
    foreign = next(folder.glob("model_world_size_*_rank_*.pt"), None)
    if foreign is not None and not (folder / MANIFEST).is_file():
        raise FileNotFoundError(
            f"{folder} was written by a different trainer ({foreign.name}): run"
            f" `python3 scripts/model_merger.py --local_dir {folder}` and start from"
            f" `worker.actor.model.model_path={folder / 'huggingface'}`"
        )
    try:
        return _checked_manifest(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: {remedy(folder)}") from None
    except ValueError as error:
        raise ValueError(f"{error}; the checkpoint is damaged: {remedy(folder)}") from None


def check_role_folder(folder: Path) -> None:
    """Raise a FileNotFoundError unless a folder is that of a role, with the config of its model."""
    if any((folder / "huggingface" / name).is_file() for name in MODEL_CONFIGS):
        return
    inside = (file for levels in range(1, 5) for file in folder.glob(f"{'*/' * levels}huggingface/*.json"))
    roles = sorted({str(file.parents[1]) for file in inside if file.name in MODEL_CONFIGS})
    found = f"; it has {', '.join(roles[-4:])}" if roles else ""
    raise FileNotFoundError(
        f"{folder / 'huggingface' / 'config.json'} is missing: `--local_dir` must be a role's folder of a"
        f" checkpoint, for example checkpoints/project/experiment/global_step_8/actor{found}"
    )


def check_digests(folder: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if _digest(folder / name) != manifest["files"][name]["sha256"]:
            raise ValueError(
                f"{folder / name} has changed since it was written (sha256); the checkpoint is damaged:"
                f" {remedy(folder)}"
            )


def remedy(folder: Path) -> str:
    """Advise to resume from another complete checkpoint of the run if there is one, else to start over."""
    own = folder if STEP_FOLDER.fullmatch(folder.name) else folder.parent
    is_step = STEP_FOLDER.fullmatch(own.name) is not None and own.parent.is_dir()
    others = [path for path in whole_steps(own.parent) if path != own] if is_step else []
    if others:
        return f"resume from another step with {resume_from(others[0])}"
    return (
        "no other checkpoint of the run is whole, so start over with `trainer.find_last_checkpoint=false` and"
        " without `trainer.load_checkpoint_path`"
    )


def resume_from(step_folder: Path) -> str:
    """Return the option that resumes from a step, as a shell reads it."""
    return f"`{shlex.quote(f'trainer.load_checkpoint_path={step_folder}')}`"


def whole_steps(root: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the newest first."""
    found = [(int(match[1]), path) for path in root.iterdir() if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if is_whole(path)]


def is_whole(step_folder: Path) -> bool:
    """Check whether a step's folder has every file of the run and of the policy, with the right size."""
    try:
        _checked_manifest(step_folder)
        _checked_manifest(step_folder / "actor")
    except (OSError, ValueError):
        return False
    return True


def write_json(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".tmp")  # readers see the old file or the new one
    with partial.open("w") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _checked_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint folder {folder}")
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, so the checkpoint is not complete")
    try:
        manifest = json.loads(path.read_bytes())
        sizes = {str(name): int(entry["bytes"]) for name, entry in manifest["files"].items()}
        _ = [str(entry["sha256"]) for entry in manifest["files"].values()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    for name, size in sizes.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path} names a file outside of its folder ({name!r})")
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes instead of {size}")
    return manifest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
