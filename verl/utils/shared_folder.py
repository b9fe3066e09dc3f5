# SPDX-License-Identifier: Apache-2.0
"""Files in a folder that several processes and nodes read and write without locks.

- A file appears by rename, complete or not at all: the folder may be on a network file system, and a process
  may be killed at any moment.
- A file is named by a digest: two hexadecimal digits are its subfolder. A reader renews its time, so that the
  files that have not been read for longest can be removed first.
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

FOLDER, TEMPORARY = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{32}\.tmp")
LONGEST_WRITE_S = 3600
SCANS_PER_BOUND = 16  # a folder is measured again after each 1/16 of its bound
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class SharedFile(NamedTuple):
    """A file of the folder."""

    path: Path
    read_at: float  # seconds since the epoch
    size: int  # bytes


def files_of(directory: Path, name: re.Pattern[str]) -> Iterator[SharedFile]:
    """Iterate over files whose name matches, and old temporary files of killed processes."""
    for folder in directory.iterdir():
        if not FOLDER.fullmatch(folder.name):
            continue
        for file in os.scandir(folder):
            with suppress(FileNotFoundError):
                status = file.stat()
                is_left = TEMPORARY.fullmatch(file.name) and time.time() - status.st_mtime > LONGEST_WRITE_S
                if is_left or name.fullmatch(file.name):
                    yield SharedFile(Path(file.path), status.st_atime, status.st_size)


def write_whole(
    path: Path, content: bytes, make_room: Callable[[int], None], *, is_durable: bool = True
) -> bool:
    """Write a file that appears complete. Return False, leaving nothing behind, if the disk is full.

    Creates the parent folder, then calls `make_room` with the number of bytes to come. With `is_durable` the
    file survives a crash of the machine.
    """
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        make_room(len(content))
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())  # else the name may survive a crash of the machine without content
        temporary.replace(path)
    except OSError as error:
        with suppress(FileNotFoundError):
            temporary.unlink()
        if error.errno not in DISK_IS_FULL:
            raise
        return False
    return True


class Room:
    """Keeps a folder within a bound by removing the files that have not been read for longest.

    Args:
        directory: Folder to keep.
        name: Pattern of the files that may be removed.
        max_bytes: Bound of the folder; each process may exceed it by 1/16 before it notices. None is half of
            the space that the disk has for it, counted when the folder is measured.
        block: Bytes; a file counts as a multiple of it.
    """

    def __init__(self, directory: Path, name: re.Pattern[str], max_bytes: int | None, block: int = 1) -> None:
        self.directory, self.name, self.max_bytes, self.block = directory, name, max_bytes, block
        self._unmeasured, self._patience = 0, -1  # bytes written since measuring; how many may be

    def make(self, coming: int) -> None:
        """Remove files until there is room for `coming` bytes. Measures the folder from time to time."""
        coming = self._on_disk(coming)
        self._unmeasured += coming
        if self._unmeasured < self._patience:
            return
        files = sorted(files_of(self.directory, self.name), key=lambda file: file.read_at)
        total = sum(self._on_disk(file.size) for file in files)
        bound = self.max_bytes or (total + shutil.disk_usage(self.directory).free) // 2
        self._unmeasured, self._patience = 0, bound // SCANS_PER_BOUND
        for file in files:
            if total + coming <= bound - self._patience:
                return
            file.path.unlink(missing_ok=True)
            total -= self._on_disk(file.size)

    def _on_disk(self, size: int) -> int:
        return -(-size // self.block) * self.block
