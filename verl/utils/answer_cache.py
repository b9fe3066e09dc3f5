# SPDX-License-Identifier: Apache-2.0
"""Texts on disk that several processes share, such as what a judge answered.

- An entry is a UTF-8 file that appears by rename: complete or not at all. Nobody locks anything, so the
  directory may lie on a network file system and a process may be killed at any moment.
- Reading renews an entry's time. When the directory outgrows its bound, the entries that nobody has read for
  longest go first.
- An empty file is what a crash of the machine can leave; it counts as missing.
"""

import errno
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from verl.utils.rank_logger import get_logger

BLOCK = 4096  # bytes: what a short file takes on most file systems
MAX_BYTES = 1 << 30
FOLDER, FILE, TEMPORARY = map(re.compile, (r"[0-9a-f]{2}", r"[0-9a-f]{30,126}", r"[0-9a-f]{32}\.tmp"))
LONGEST_WRITE_S = 3600
SCANS_PER_BOUND = 16  # the directory is measured again after each 1/16 of its bound

logger = get_logger(__name__)


class AnswerCache:
    """A bounded directory of texts by name, for any number of threads and processes.

    Example::

        cache = AnswerCache("/scratch/judge")
        cache.get("3fa9...")  # None: a digest of at least 128 bits names the text
        cache.put("3fa9...", "Score: 7")
        cache.get("3fa9...")  # "Score: 7"

    Args:
        directory: Made if missing.
        max_bytes: Bound of the directory, files rounded up to 4 KiB; each process may exceed it by 1/16
            before it notices.
    """

    def __init__(self, directory: str | Path, max_bytes: int = MAX_BYTES) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # guards the two below
        self._unmeasured: int | None = None  # bytes written since the directory was measured; None is never
        self._is_full = False  # the disk refused an entry; said once

    def get(self, name: str) -> str | None:
        """Return the text under `name`, a hexadecimal digest; None if there is none (any more)."""
        try:
            with self._path(name).open("rb") as file:
                content = file.read()
                with suppress(PermissionError):  # another user's entry can be read, not renewed
                    os.utime(file.fileno())
        except FileNotFoundError:
            return None
        return content.decode("utf-8", "surrogatepass") if content else None

    def put(self, name: str, text: str) -> None:
        """Store a text that is not empty under `name`, a hexadecimal digest.

        A disk without room is a warning: the text is asked for again next time.
        """
        assert text, "an empty entry is one that a crash left"
        content = text.encode("utf-8", "surrogatepass")
        path = self._path(name)
        temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(_size_on_disk(len(content)))
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # else the name may survive a crash of the machine without content
            temporary.replace(path)
        except OSError as error:
            with suppress(FileNotFoundError):
                temporary.unlink()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._warn_once()

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / name[2:]

    def _make_room(self, coming: int) -> None:
        with self._lock:
            if self._unmeasured is not None and self._unmeasured + coming < self.max_bytes // SCANS_PER_BOUND:
                self._unmeasured += coming
                return
            self._unmeasured = coming
        files = sorted(_entries(self.directory), key=lambda entry: entry.read_at)
        total = sum(entry.size for entry in files) + coming
        for entry in files:
            if total <= self.max_bytes * (SCANS_PER_BOUND - 1) // SCANS_PER_BOUND:
                return
            entry.path.unlink(missing_ok=True)
            total -= entry.size

    def _warn_once(self) -> None:
        with self._lock:
            is_news, self._is_full = not self._is_full, True
        if is_news:
            logger.warning("no room to store answers, which are asked for again: path=%s", self.directory)


class _Entry(NamedTuple):
    path: Path
    read_at: float
    size: int


def _entries(directory: Path) -> Iterator[_Entry]:
    """Every entry, and what killed processes were writing; nothing else that the directory may hold."""
    for folder in directory.iterdir():
        if not FOLDER.fullmatch(folder.name):
            continue
        for file in os.scandir(folder):
            with suppress(FileNotFoundError):
                status = file.stat()
                is_left = TEMPORARY.fullmatch(file.name) and time.time() - status.st_mtime > LONGEST_WRITE_S
                if is_left or FILE.fullmatch(file.name):
                    yield _Entry(Path(file.path), status.st_mtime, _size_on_disk(status.st_size))


def _size_on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
