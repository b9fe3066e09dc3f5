# SPDX-License-Identifier: Apache-2.0
"""Resolve the name of a model: a checkpoint is merged into a temporary folder, others are used as is.

Importing this module imports no torch.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from verl.checkpoint.manifest import MANIFEST, STEP_FOLDER
from verl.config.files.model_files import has_weights

ACTOR, HUGGINGFACE = "actor", "huggingface"  # folders of a checkpoint
SHARDS = "model_world_size_*_rank_*.pt"  # of checkpoints of EasyR1 and verl


class NamedModel(NamedTuple):
    """A model to load."""

    path: str  # folder or hub name
    name: str  # short, for folders and titles
    step: int  # of its checkpoint, else 0


def actor_folder(model: str) -> Path | None:
    """Return the folder of the policy's shards; None if `model` is another folder or a hub name.

    A checkpoint may be named by `global_step_N`, by its `actor`, or by the `huggingface` in it.
    """
    folder = Path(model).expanduser()
    for candidate in (folder / ACTOR, folder, folder.parent):
        if (candidate / MANIFEST).is_file() and STEP_FOLDER.fullmatch(candidate.absolute().parent.name):
            return candidate.absolute()
        if any(candidate.glob(SHARDS)):
            return candidate.absolute()
    return None


@contextmanager
def loadable(model: str, *, trust_remote_code: bool = False) -> Iterator[NamedModel]:
    """Yield a model that transformers and vLLM load; merged weights of a checkpoint end with the block."""
    actor = actor_folder(model)
    if actor is None:
        folder = Path(model).expanduser()
        path = str(folder) if folder.is_dir() else model
        yield NamedModel(path, Path(path).name or path, 0)
        return
    match = STEP_FOLDER.fullmatch(actor.parent.name)
    step = int(match[1]) if match else 0
    name = f"{actor.parent.parent.name}_{actor.parent.name}"
    exported = actor / HUGGINGFACE
    if has_weights(exported):
        yield NamedModel(str(exported), name, step)
        return
    from verl.checkpoint.merger import merge_checkpoint  # noqa: PLC0415 - torch loads after options are read

    with tempfile.TemporaryDirectory(prefix="verl-merged-") as temporary:
        copy = _linked(actor, Path(temporary, ACTOR))
        merged = merge_checkpoint(copy, trust_remote_code=trust_remote_code)
        yield NamedModel(str(merged), name, step)


def _linked(actor: Path, copy: Path) -> Path:
    """Make a folder with links to the shards and copies of the small files, which the merger may write."""
    copy.mkdir()
    for entry in actor.iterdir():
        if entry.name == HUGGINGFACE:
            shutil.copytree(entry, copy / HUGGINGFACE)
        else:
            (copy / entry.name).symlink_to(entry)
    return copy
