# SPDX-License-Identifier: Apache-2.0
"""Video and audio files that the page may play: only those in folders that the viewer was given for it.

A run's rows name the files, and a run may come from anyone: without this limit a row could name any file.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.viewer.rollout_store import is_inside

PLAYED = {
    "video": {".mp4": "video/mp4", ".m4v": "video/mp4", ".webm": "video/webm", ".mov": "video/quicktime"},
    "audio": {
        ".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".ogg": "audio/ogg",
        ".opus": "audio/ogg", ".m4a": "audio/mp4",
    },
}  # fmt: skip
MEDIA_TYPES = {suffix: name for types in PLAYED.values() for suffix, name in types.items()}


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
