# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: written to a temporary folder, published by renaming, pruned, and found again.

Example::

    tracker = CheckpointTracker("checkpoints/math/first", save_limit=3)
    folder = tracker.begin(step=8)  # …/global_step_8.tmp
    ...  # all workers write into it
    tracker.publish(step=8, score=0.61)  # …/global_step_8; older steps are removed
    find_last_checkpoint("checkpoints/math/first")
"""

import json
import logging
import math
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from verl.checkpoint.manifest import STEP_FOLDER, check_digests, is_whole, read_manifest, remedy, write_json
from verl.config.trainer import RunConfig

logger = logging.getLogger(__name__)

TRACKER = "checkpoint_tracker.json"
PARTIAL = ".tmp"  # suffix of a folder that is being written


@dataclass(frozen=True)
class CheckpointRecord:
    """The contents of `checkpoint_tracker.json`: the last and the best checkpoint, if any."""

    last_global_step: int | None = None
    last_actor_path: str | None = None
    best_global_step: int | None = None
    best_actor_path: str | None = None
    best_val_reward_score: float | None = None


class CheckpointTracker:
    """The checkpoints in a folder, of which the `save_limit` newest and the best are kept (-1 keeps all)."""

    def __init__(self, root: Path | str, save_limit: int = -1) -> None:
        self.root = Path(root)
        self.save_limit = save_limit
        self.record = read_record(self.root) or CheckpointRecord()

    def begin(self, step: int) -> Path:
        """Create an empty folder for a step, after removing incomplete folders of an interrupted run."""
        self.clear()
        folder = _partial(self.root / f"global_step_{step}")
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise OSError(
                f"`trainer.save_checkpoint_path` ({self.root}) cannot be written ({error.strerror}):"
                " choose a folder that this user may write"
            ) from error
        return folder

    def clear(self) -> None:
        for leftover in self.root.glob(f"global_step_*{PARTIAL}"):
            logger.info("removing an incomplete checkpoint: path=%s", leftover)
            shutil.rmtree(leftover)

    def publish(self, step: int, score: float | None = None) -> Path:
        """Publish a complete folder under its final name, then remove the steps that are not kept.

        `score` is that of the last validation, higher is better; None before the first one.
        """
        folder, before = self.root / f"global_step_{step}", self.record
        best = (before.best_global_step, before.best_actor_path, before.best_val_reward_score)
        if before.best_global_step == step:  # rewritten after a resume from an earlier step
            best = (None, None, None)
        if score is not None and (best[2] is None or score > best[2]):
            best = (step, str(folder / "actor"), score)
        self.record = CheckpointRecord(step, str(folder / "actor"), *best)
        write_json(self.root / TRACKER, asdict(self.record))  # a run killed after this can be resumed
        try:
            replace_folder(_partial(folder), folder)
        except OSError:
            self.record = before
            write_json(self.root / TRACKER, asdict(before))
            raise
        self._prune()
        return folder

    def _prune(self) -> None:
        if self.save_limit <= 0:
            return
        matches = [(STEP_FOLDER.fullmatch(folder.name), folder) for folder in self.root.iterdir()]
        folders = {int(match[1]): folder for match, folder in matches if match}
        # A run that resumed from an earlier step writes smaller numbers than the steps it abandons.
        newest = sorted(folders, key=lambda step: (folders[step].stat().st_mtime_ns, step), reverse=True)
        kept = {*newest[: self.save_limit], self.record.last_global_step, self.record.best_global_step}
        for step, folder in folders.items():
            if step not in kept:
                shutil.rmtree(folder)


def read_record(root: Path | str) -> CheckpointRecord | None:
    """Read the tracker file of a folder, EasyR1's included; None if there is none."""
    path = Path(root) / TRACKER
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        record = CheckpointRecord(*(content.get(entry.name) for entry in fields(CheckpointRecord)))
        _check_record(record)
        return record
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): remove it and set `trainer.load_checkpoint_path` to a"
            " global_step_N folder next to it"
        ) from error


def best_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint with the best validation if it is whole, else the last one, if there is any."""
    record = read_record(root) or CheckpointRecord()
    steps = (record.best_global_step, record.last_global_step)
    return next(filter(is_whole, (root / f"global_step_{step}" for step in steps)), None)


def find_last_checkpoint(root: Path | str) -> Path | None:
    """Return the newest complete checkpoint in a folder; None if nothing was saved there."""
    record = read_record(root)
    if record is None or record.last_global_step is None:
        return None
    folder = Path(root) / f"global_step_{record.last_global_step}"
    if not folder.is_dir():  # the run was killed while it renamed the folder
        written = next(filter(is_whole, (_partial(folder), _aside(folder))), None)
        if written is not None:
            written.rename(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{Path(root) / TRACKER} names {folder.name}, which is missing: {remedy(folder)}"
        )
    return folder


def checkpoint_to_resume(trainer: RunConfig) -> Path | None:
    """Return the checkpoint to resume from, after verifying all of its files; None to start from scratch.

    `trainer.load_checkpoint_path` takes precedence over the newest checkpoint in the run's folder.
    """
    if trainer.load_checkpoint_path is not None:
        folder = Path(trainer.load_checkpoint_path)
    elif trainer.find_last_checkpoint:
        folder = find_last_checkpoint(trainer.checkpoint_folder)
    else:
        return None
    if folder is not None:
        checkpoint_step(folder)
        read_manifest(folder / "actor")
        manifest = read_manifest(folder)
        check_digests(folder, manifest, manifest["files"])
    return folder


def checkpoint_step(path: Path | str) -> int:
    """Return the step of a checkpoint folder given as `trainer.load_checkpoint_path`."""
    folder = Path(path)
    match = STEP_FOLDER.fullmatch(folder.name)
    if match is None:
        hint = "it is incomplete, choose another step" if folder.name.endswith(PARTIAL) else "name one step"
        raise ValueError(f"`trainer.load_checkpoint_path` must end in global_step_N, got {folder}: {hint}")
    if not folder.is_dir():
        raise FileNotFoundError(f"`trainer.load_checkpoint_path`: no folder {folder}")
    return int(match.group(1))


def _check_record(record: CheckpointRecord) -> None:
    for entry in fields(record):
        value = getattr(record, entry.name)
        if entry.name.endswith("_step"):
            fits = type(value) is int and STEP_FOLDER.fullmatch(f"global_step_{value:d}") is not None
        elif entry.name.endswith("_path"):
            fits = isinstance(value, str)
        else:
            fits = type(value) in (int, float) and abs(value) < math.inf
        if value is not None and not fits:
            raise ValueError(f"`{entry.name}` is {value!r:.80}")


def replace_folder(partial: Path, final: Path) -> None:
    """Rename a complete folder to its final name, and remove an earlier one of that name."""
    aside = _aside(final)  # the old folder is deleted only after the new one is in its place
    if final.exists():
        final.rename(aside)
    partial.rename(final)
    if aside.exists():
        shutil.rmtree(aside)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the new name survives a power failure
    finally:
        os.close(descriptor)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{PARTIAL}")


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old{PARTIAL}")
