# SPDX-License-Identifier: Apache-2.0
"""Runs in the viewer: folders with a log of metrics, kept rollouts, or both.

Notes and tags of a run are in `notes.json` in its folder, the only file that the viewer writes.
"""

import errno
import fcntl
import json
import os
import stat
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.config.hints.missing_paths import missing
from verl.logger.base import flatten
from verl.logger.file import CONFIG_FILE, METRICS_FILE, read_log
from verl.utils.shared_folder import write_whole
from verl.viewer.rollout_index import RolloutIndex, Signature, plain, signature
from verl.viewer.rollout_store import FOLDER, is_inside

NOTES_FILE = "notes.json"
MAX_NOTE, MAX_TAGS, MAX_TAG = 10_000, 20, 40  # characters, number, characters
NOTES_BYTES = 6 * MAX_NOTE + 12 * MAX_TAGS * MAX_TAG  # at most, of their JSON with escapes
LOCK_FILE = "run.lock"
RUNNING, ENDED, KILLED, UNKNOWN = "running", "ended", "killed", "unknown"
FLOCK = "hhqqi4x"  # Linux: l_type, l_whence, l_start, l_len, l_pid
QUIET = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a link or a pipe may be in its place
NOT_FOLLOWED = "a link out of the run's folder is not followed"
DEPTH = 2  # folders between the given one and a run: PROJECT/EXPERIMENT
MAX_CONFIG = 4 * 2**20  # bytes
PLAYED = {
    "video": {".mp4": "video/mp4", ".m4v": "video/mp4", ".webm": "video/webm", ".mov": "video/quicktime"},
    "audio": {
        ".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".ogg": "audio/ogg",
        ".opus": "audio/ogg", ".m4a": "audio/mp4",
    },
}  # fmt: skip
MEDIA_TYPES = {suffix: name for types in PLAYED.values() for suffix, name in types.items()}


class RunFolder:
    """One run: its metrics and rollouts, as currently on disk."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.rollouts = RolloutIndex(folder)
        self._lock = threading.Lock()
        self._log: tuple[Signature | None, dict[str, Any]] = (None, {"step": [], "metrics": {}})

    def state(self) -> dict[str, Any]:
        """Return what the page polls; `version` changes with any displayed content."""
        rollouts = self.rollouts.refresh()
        paths = (self.folder / METRICS_FILE, self.folder / FOLDER)
        notes = self.folder / NOTES_FILE
        files = [path.stat() for path in (*paths, notes) if path.exists()]
        links = [path.name for path in paths if not is_inside(path, self.folder)]
        state = {
            "name": self.name,
            "folder": str(self.folder),
            "state": run_state(self.folder),
            "num_rollouts": rollouts.num_rows,
            "problems": dict(self.rollouts.problems) | dict.fromkeys(links, NOT_FOLLOWED),
            "version": str([(file.st_size, file.st_mtime_ns) for file in files]),
        }
        return plain(state)

    def metrics(self) -> dict[str, Any]:
        """Logged metrics as columns: `{"step": [1, 2], "metrics": {"reward/overall": [0.5, None]}}`."""
        path = self.folder / METRICS_FILE
        with self._lock:  # several views ask for the same log
            seen = signature(path) if os.path.isfile(path) and is_inside(path, self.folder) else None
            before, columns = self._log
            if seen is None or seen != before:
                columns = _columns(read_log(self.folder) if seen else [])
                self._log = (seen, columns)
            return columns

    def config(self) -> dict[str, Any]:
        """Options of the last start by path, `{"worker.rollout.n": 8}`; empty if unreadable."""
        path = self.folder / CONFIG_FILE
        try:
            if not path.is_file() or not is_inside(path, self.folder) or path.stat().st_size > MAX_CONFIG:
                return {}
            config = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            return flatten(config, ".") if isinstance(config, dict) else {}
        except (OSError, ValueError, RecursionError):
            return {}

    def total_steps(self) -> int | None:
        """Steps in the run's config; None if it counts epochs or is unreadable."""
        total = self.config().get("trainer.max_steps")
        return total if isinstance(total, int) else None

    def times(self) -> tuple[float | None, float | None]:
        """Seconds since 1970 of the first start, when its config was written, and of the last step."""
        paths = [*self.folder.glob("experiment_config*.json"), self.folder / METRICS_FILE]
        *configs, log = (signature(path) if os.path.isfile(path) else None for path in paths)
        started = min((time for time, _ in filter(None, configs)), default=None)
        return (started and started / 1e9), (log and log[0] / 1e9)


def _columns(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = sorted({name for entry in log for name in entry if name != "step"})
    columns = {plain(name): [_number(entry.get(name)) for entry in log] for name in names}
    return {"step": [entry["step"] for entry in log], "metrics": columns}


def _number(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # JSON has integers of any size
        return None
    return plain(value) if isinstance(value, int | float) else None


def open_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Open runs, given as run folders or as folders of `PROJECT/EXPERIMENT` or `EXPERIMENT`.

    Raises:
        FileNotFoundError: A folder does not exist.
        ValueError: A folder contains no run.
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise missing("folder", Path(os.path.abspath(folder)))
        runs = _runs_in(Path(os.path.abspath(folder)), DEPTH)
        if not runs:
            raise ValueError(f"no run in {folder}: a run has `{METRICS_FILE}` or `{FOLDER}/`")
        found += [run for run in runs if run not in found]
    length = 1  # of the shortest ends of the paths that are distinct: the names of the runs
    while len({run.parts[-length:] for run in found}) < len(found):
        length += 1
    return [RunFolder(run, "/".join(run.parts[-length:])) for run in found]


def _runs_in(folder: Path, depth: int) -> list[Path]:
    if (folder / METRICS_FILE).exists() or (folder / FOLDER).is_dir():
        return [folder]
    if depth == 0 or not folder.is_dir():
        return []
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    return [run for path in inside for run in _runs_in(path, depth - 1)]


class VideoFolders:
    """Folders with videos and audio, in the order in which relative paths are looked up.

    Example::

        VideoFolders([Path("/data/films")]).find("/data/films/7.mp4")
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]

    def find(self, source: Any) -> Path | None:
        """Return the file that a row names, if it can be played and is inside one of the folders."""
        if not isinstance(source, str) or "\0" in source or Path(source).suffix.lower() not in MEDIA_TYPES:
            return None
        for folder in self.folders:
            path = folder / source  # an absolute source replaces the folder
            if is_inside(path, folder) and os.path.isfile(path):  # also False for impossible names
                return path
        return None

    def mark(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add `is_playable` to the media of the responses to a prompt."""
        for row in rows:
            for medium in filter(None, row["media"] or []):
                medium["is_playable"] = medium["kind"] in PLAYED and self.find(medium["source"]) is not None
        return rows


def run_state(folder: Path) -> str:
    """Return `running`, `ended`, `killed` (it left its lock file), or `unknown` without locks to ask for.

    A run locks the file until it ends and removes it. Must not be called in the process of the run: closing
    any descriptor of a file releases the locks that the process holds on it.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, QUIET)
    except OSError as error:
        return ENDED if error.errno == errno.ENOENT else UNKNOWN
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or sys.platform != "linux":
            return UNKNOWN
        return RUNNING if _is_locked(descriptor) else KILLED
    except OSError:  # a file system without locks
        return UNKNOWN
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    # Asks without locking: a lock held for an instant would make a run that starts in it fail.
    question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    return struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK


def checked_notes(content: bytes) -> dict[str, Any]:
    """Parse and check what a page sent or a file holds: `note` and `tags`; raise `ValueError` by name."""
    try:
        found = json.loads(content)
    except RecursionError as error:
        raise ValueError("notes are nested too deeply") from error
    if not isinstance(found, dict) or set(found) - {"note", "tags"}:
        raise ValueError('notes are an object with "note" and "tags"')
    note, tags = found.get("note", ""), found.get("tags", [])
    if not isinstance(note, str) or len(note) > MAX_NOTE:
        raise ValueError(f"`note` must be a text of at most {MAX_NOTE} characters")
    are_texts = isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
    if not are_texts or len(tags) > MAX_TAGS or any(len(tag) > MAX_TAG for tag in tags):
        raise ValueError(f"`tags` must be at most {MAX_TAGS} texts of at most {MAX_TAG} characters")
    return {"note": note, "tags": list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))}


def read_notes(run_folder: Path) -> dict[str, Any]:
    """Return the note, the tags, and the problem with the file, if any."""
    path = run_folder / NOTES_FILE
    notes, problem = checked_notes(b"{}"), ""
    try:
        if path.is_file() and is_inside(path, run_folder):
            with path.open("rb") as file:
                notes = checked_notes(file.read(NOTES_BYTES))
    except (OSError, ValueError) as error:
        problem = f"{NOTES_FILE}: {error}"
    return notes | {"problem": problem}


def write_notes(run_folder: Path, notes: dict[str, Any]) -> None:
    """Write the file, complete or not at all; raise `OSError` with a reason for people."""
    if not run_folder.is_dir():  # else it would be made
        raise OSError(f"{run_folder} does not exist any more")
    content = json.dumps(notes, indent=2).encode() + b"\n"
    try:
        is_written = write_whole(run_folder / NOTES_FILE, content, make_room=lambda size: None)
    except OSError as error:
        raise OSError(f"{run_folder} cannot be written: {error.strerror}") from error
    if not is_written:
        raise OSError(f"{run_folder} cannot be written: its disk is full")
