# SPDX-License-Identifier: Apache-2.0
"""Decoded videos on disk, kept from run to run and shared by all processes and nodes that see the folder.

- An entry is a safetensors file that appears by rename: complete or not at all. Nobody locks anything, so the
  folder may lie on a network file system and a process may be killed at any moment; two processes that want
  the same missing entry at once both make it.
- Reading maps the file and renews its time. When the folder outgrows its bound, the entries that nobody has
  read for longest go first; whoever has them mapped keeps them.
- A file that a crash of the machine left damaged counts as missing and is made again.
- Other files in the folder are left alone.
"""

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from verl.utils.media_cache import Entry, encode_entry, read_entry
from verl.utils.rank_logger import get_logger

FOLDER = re.compile(r"[0-9a-f]{2}")
FILE = re.compile(r"[0-9a-f]{30,126}\.safetensors")
TEMPORARY = re.compile(r"[0-9a-f]{32}\.tmp")
LONGEST_WRITE_S = 3600
SCANS_PER_BOUND = 16  # the folder is measured again after each 1/16 of its bound

logger = get_logger(__name__)


class FrameCache:
    """A bounded folder of entries by name.

    Example::

        cache = FrameCache("/scratch/frames")
        entry = cache.get_or_make("3fa9...", lambda: Entry({"frames": decode(path)}, {"fps": 24.0}))

    Args:
        directory: Made if missing.
        max_bytes: Bound of the folder; each process may exceed it by 1/16 before it notices. None is half of
            the space that the disk has for it, counted when the folder is measured.
    """

    def __init__(self, directory: str | Path, max_bytes: int | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.max_bytes = max_bytes
        self.directory.mkdir(parents=True, exist_ok=True)
        self._unmeasured, self._patience = 0, -1  # bytes written since measuring; how many may be

    def get_or_make(self, key: str, make: Callable[[], Entry]) -> Entry:
        """The entry under `key`; if there is none, `make` is called and its result kept.

        Args:
            key: A hexadecimal digest of the content and of every option that shaped the entry.
            make: What it raises is passed on, and nothing is kept.
        """
        path = self.directory / key[:2] / f"{key[2:]}.safetensors"
        entry = _read(path)
        if entry is None:
            entry = make()
            self._write(path, entry)
        return entry

    def _write(self, path: Path, entry: Entry) -> None:
        content = encode_entry(entry)
        temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(len(content))
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
            logger.warning("no room to keep decoded frames: path=%s bytes=%d", self.directory, len(content))

    def _make_room(self, coming: int) -> None:
        self._unmeasured += coming
        if self._unmeasured <= self._patience:
            return
        files = sorted(_files(self.directory), key=lambda file: file.read_at)
        total = sum(file.size for file in files)
        bound = self.max_bytes or (total + shutil.disk_usage(self.directory).free) // 2
        self._unmeasured, self._patience = 0, bound // SCANS_PER_BOUND
        for file in files:
            if total + coming <= bound - self._patience:
                return
            file.path.unlink(missing_ok=True)
            total -= file.size


class _File(NamedTuple):
    path: Path
    read_at: float
    size: int


def _read(path: Path) -> Entry | None:
    try:
        entry = read_entry(path)
    except SafetensorError:
        logger.warning("a damaged file of the frame cache is made again: path=%s", path)
        return None
    if entry is not None:
        with suppress(FileNotFoundError, PermissionError):  # gone since, or another user's
            os.utime(path)
    return entry


def _files(directory: Path) -> Iterator[_File]:
    """Every entry, and what killed processes were writing."""
    for folder in directory.iterdir():
        if not FOLDER.fullmatch(folder.name):
            continue
        for file in os.scandir(folder):
            with suppress(FileNotFoundError):
                status = file.stat()
                is_left = TEMPORARY.fullmatch(file.name) and time.time() - status.st_mtime > LONGEST_WRITE_S
                if is_left or FILE.fullmatch(file.name):
                    yield _File(Path(file.path), status.st_mtime, status.st_size)
