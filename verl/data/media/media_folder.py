# SPDX-License-Identifier: Apache-2.0
"""What was made of media on disk, kept from run to run and shared by all processes that see the folder.

Holds decoded frames (`data.cache_dir`), or what a frozen vision tower computed
(`worker.actor.cached_embeds_dir`).

- An entry is a safetensors file of a `shared_folder`; two processes that want the same missing entry at once
  both make it.
- Reading maps the file and renews its time. When the folder outgrows its bound, the entries that nobody has
  read for longest go first; whoever has them mapped keeps them.
- A file that a crash of the machine left damaged counts as missing and is made again.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from verl.data.media.cache import Entry, encode_entry, read_entry
from verl.utils.rank_logger import get_logger
from verl.utils.shared_folder import Room, write_whole

FILE = re.compile(r"[0-9a-f]{30,126}\.safetensors")

logger = get_logger(__name__)


class MediaFolder:
    """A bounded folder of entries by name.

    Example::

        cache = MediaFolder("/scratch/frames")
        entry = cache.get_or_make("3fa9...", lambda: Entry({"frames": decode(path)}, {"fps": 24.0}))

    Args:
        directory: Made if missing.
        max_bytes: Bound of the folder; each process may exceed it by 1/16 before it notices. None is half of
            the space that the disk has for it, counted when the folder is measured.
    """

    def __init__(self, directory: str | Path, max_bytes: int | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._room = Room(self.directory, FILE, max_bytes)

    def get_or_make(self, key: str, make: Callable[[], Entry]) -> Entry:
        """The entry under `key`; if there is none, `make` is called and its result kept.

        Args:
            key: A hexadecimal digest of the content and of every option that shaped the entry.
            make: What it raises is passed on, and nothing is kept.
        """
        entry = self.get(key)
        if entry is None:
            entry = make()
            self._write(self._path(key), entry)
        return entry

    def get(self, key: str) -> Entry | None:
        """The entry under `key`, if there is one."""
        return _read(self._path(key))

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key[2:]}.safetensors"

    def _write(self, path: Path, entry: Entry) -> None:
        content = encode_entry(entry)
        if not write_whole(path, content, self._room.make):
            logger.warning(
                "no room to keep what was made of media: path=%s bytes=%d", self.directory, len(content)
            )


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
