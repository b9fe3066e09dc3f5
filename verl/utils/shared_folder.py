# SPDX-License-Identifier: Apache-2.0
"""Files in a folder that several processes and nodes read and write without locks.

A file appears by rename, complete or not at all. Its name is a digest, whose first two digits are its
subfolder. A reader renews its time, so that the least recently read files can be removed first.
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

FOLDER, TEMPORARY = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{32}\.tmp")
LONGEST_WRITE_S = 3600
SCANS_PER_BOUND = 16  # a folder is measured again after each 1/16 of its bound
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(
    path: Path, content: bytes, make_room: Callable[[int], None], *, is_durable: bool = True
) -> bool:
    """Write a file that appears complete; return False, leaving nothing behind, if the disk is full."""
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
        temporary.unlink(missing_ok=True)
        if error.errno not in DISK_IS_FULL:
            raise
        return False
    return True


class Room:
    """Keeps a folder within a bound by removing the least recently read files.

    Args:
        name: Pattern of the files that may be removed.
        max_bytes: Bound of the folder, which each process may exceed by 1/16; None is half of the disk.
        block: Bytes; a file counts as a multiple of it.
    """

    def __init__(self, directory: Path, name: re.Pattern[str], max_bytes: int | None, block: int = 1) -> None:
        self.directory, self.name, self.max_bytes, self.block = directory, name, max_bytes, block
        self._unmeasured, self._patience = 0, -1  # bytes written since measuring; how many may be

    def make(self, coming: int) -> None:
        """Remove files until there is room for `coming` bytes; the folder is measured from time to time."""
        coming = self._on_disk(coming)
        self._unmeasured += coming
        if self._unmeasured < self._patience:
            return
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        bound = self.max_bytes or (total + shutil.disk_usage(self.directory).free) // 2
        self._unmeasured, self._patience = 0, bound // SCANS_PER_BOUND
        for _, size, path in files:
            if total + coming <= bound - self._patience:
                return
            Path(path).unlink(missing_ok=True)
            total -= size

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield the time, size and path of files whose name matches, and of what killed processes left."""
        for folder in filter(lambda folder: FOLDER.fullmatch(folder.name), self.directory.iterdir()):
            for file in os.scandir(folder):
                with suppress(FileNotFoundError):
                    status = file.stat()
                    is_old = time.time() - status.st_mtime > LONGEST_WRITE_S
                    if self.name.fullmatch(file.name) or (is_old and TEMPORARY.fullmatch(file.name)):
                        yield status.st_atime, self._on_disk(status.st_size), file.path

    def _on_disk(self, size: int) -> int:
        return -(-size // self.block) * self.block
