# SPDX-License-Identifier: Apache-2.0
"""Answers of models on disk, so that equal questions are asked once."""

import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from verl.utils.rank_logger import get_logger
from verl.utils.shared_folder import Room, write_whole

MAX_CACHE_BYTES = 1 << 30
BLOCK = 4096  # bytes that a short file takes on most file systems
ANSWER_FILE = re.compile(r"[0-9a-f]{30,126}")

logger = get_logger(__name__)


class AnswerCache:
    """A bounded directory of texts by hexadecimal digest, for any number of threads and processes."""

    def __init__(self, directory: str | Path, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._room = Room(self.directory, ANSWER_FILE, max_bytes, BLOCK)
        self._lock = threading.Lock()  # guards `_room`
        self._has_warned = False

    def get(self, name: str) -> str | None:
        try:
            with self._path(name).open("rb") as file:
                content = file.read()
                with suppress(PermissionError):  # another user's entry can be read, not renewed
                    os.utime(file.fileno())
        except FileNotFoundError:
            return None
        # A crash of the machine can leave an empty file.
        return content.decode("utf-8", "surrogatepass") if content else None

    def put(self, name: str, text: str) -> None:
        """Store a text that is not empty. A full disk is a warning: the judge will be asked again."""
        content = text.encode("utf-8", "surrogatepass")
        if not write_whole(self._path(name), content, self._make_room) and not self._has_warned:
            self._has_warned = True
            logger.warning("no room to store answers, which are asked for again: path=%s", self.directory)

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / name[2:]

    def _make_room(self, coming: int) -> None:
        with self._lock:
            self._room.make(coming)
