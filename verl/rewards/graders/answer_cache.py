# SPDX-License-Identifier: Apache-2.0
"""Texts on disk that several processes share, such as what a judge answered.

- An entry is a UTF-8 file of a `shared_folder`.
- Reading renews an entry's time. When the directory outgrows its bound, the entries that nobody has read for
  longest go first.
- An empty file is what a crash of the machine can leave; it counts as missing.
"""

import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from verl.utils.rank_logger import get_logger
from verl.utils.shared_folder import SCANS_PER_BOUND, files_of, write_whole

BLOCK = 4096  # bytes: what a short file takes on most file systems
MAX_BYTES = 1 << 30
FILE = re.compile(r"[0-9a-f]{30,126}")

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
        if not write_whole(self._path(name), content, self._make_room):
            self._warn_once()

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / name[2:]

    def _make_room(self, coming: int) -> None:
        coming = _size_on_disk(coming)
        with self._lock:
            if self._unmeasured is not None and self._unmeasured + coming < self.max_bytes // SCANS_PER_BOUND:
                self._unmeasured += coming
                return
            self._unmeasured = coming
        files = sorted(files_of(self.directory, FILE), key=lambda file: file.read_at)
        total = sum(_size_on_disk(file.size) for file in files) + coming
        for file in files:
            if total <= self.max_bytes * (SCANS_PER_BOUND - 1) // SCANS_PER_BOUND:
                return
            file.path.unlink(missing_ok=True)
            total -= _size_on_disk(file.size)

    def _warn_once(self) -> None:
        with self._lock:
            is_news, self._is_full = not self._is_full, True
        if is_news:
            logger.warning("no room to store answers, which are asked for again: path=%s", self.directory)


def _size_on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
