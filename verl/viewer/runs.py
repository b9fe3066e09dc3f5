# SPDX-License-Identifier: Apache-2.0
"""Runs in the viewer: folders with a log of metrics, kept rollouts, or both."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config.hints.missing_paths import missing
from verl.logger.file import METRICS_FILE, read_log
from verl.viewer.rollout_index import RolloutIndex, plain
from verl.viewer.rollout_store import FOLDER, is_inside

NOT_FOLLOWED = "a link out of the run's folder is not followed"
DEPTH = 2  # folders between the given one and a run: PROJECT/EXPERIMENT


class RunFolder:
    """One run: its metrics and rollouts, as currently on disk."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.rollouts = RolloutIndex(folder)

    def state(self) -> dict[str, Any]:
        """Return what the page polls; `version` changes with any displayed content."""
        rollouts = self.rollouts.refresh()
        paths = (self.folder / METRICS_FILE, self.folder / FOLDER)
        files = [path.stat() for path in paths if path.exists()]
        links = [path.name for path in paths if not is_inside(path, self.folder)]
        state = {
            "name": self.name,
            "folder": str(self.folder),
            "num_rollouts": rollouts.num_rows,
            "problems": dict(self.rollouts.problems) | dict.fromkeys(links, NOT_FOLLOWED),
            "version": str([(file.st_size, file.st_mtime_ns) for file in files]),
        }
        return plain(state)

    def metrics(self) -> dict[str, Any]:
        """Logged metrics as columns: `{"step": [1, 2], "metrics": {"reward/overall": [0.5, None]}}`."""
        path = self.folder / METRICS_FILE
        log = read_log(self.folder) if path.is_file() and is_inside(path, self.folder) else []
        names = sorted({name for entry in log for name in entry if name != "step"})
        columns = {plain(name): [_number(entry.get(name)) for entry in log] for name in names}
        return {"step": [entry["step"] for entry in log], "metrics": columns}


def _number(value: Any) -> Any:
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
