# SPDX-License-Identifier: Apache-2.0
"""Media that rows name by URL: fetched once, and from then on files like any other.

- A file stands in a `shared_folder` under a digest of its URL. Who needs a missing one holds a lock on a
  record beside it, so that the processes that see the folder fetch it once.
- What cannot be fetched is written into the record with the name of the run; the run does not ask again.
- Reading renews the time of a file. When the folder outgrows its bound, the files that nobody has read for
  longest go first, and are fetched again when they are needed.

A URL is taken to name the same content for as long as its file is there.
"""

import fcntl
import hashlib
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from verl.data.media.download import DownloadLimits, download
from verl.utils.shared_folder import Room

FILE = re.compile(r"[0-9a-f]{38}(\.failed)?")
URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(source: str | bytes) -> TypeGuard[str]:
    """Whether a reference is a URL that is not simply a path."""
    return isinstance(source, str) and URL.match(source) is not None


@dataclass(frozen=True)
class UrlOptions:
    """How media are fetched; equal in every process of a run.

    Attributes:
        directory: Keeps the files; None is a folder of this user in the temporary folder of each node.
        limits: What a download may do.
    """

    directory: str | None = None
    limits: DownloadLimits = field(default_factory=DownloadLimits)

    @classmethod
    def from_data(cls, data: Any) -> "UrlOptions":
        """Take them from the `data` section of a config."""
        limits = DownloadLimits(
            hosts=tuple(host.lower() for host in data.media_url_hosts),
            timeout_s=data.media_url_timeout_s,
            max_bytes=data.media_url_max_mb << 20,
        )
        return cls(data.media_url_dir, limits)


class UrlFolder:
    """The files that URLs name, kept from run to run.

    Example::

        path = UrlFolder(UrlOptions("/scratch/media"), run_id="run-7").path("https://example.org/cat.png")

    Args:
        options: Where files are kept, and what a download may do.
        run_id: Names the run, which asks for a URL that failed no second time; None is this object and its
            copies.
        max_bytes: Bound of the folder; None is half of the space that the disk has for it.

    Raises:
        RuntimeError: The folder in the temporary folder is another user's.
    """

    def __init__(self, options: UrlOptions, run_id: str | None, max_bytes: int | None = None) -> None:
        self.directory = _own_folder() if options.directory is None else Path(options.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.limits = options.limits
        self._run_id = run_id or uuid.uuid4().hex
        self._room = Room(self.directory, FILE, max_bytes)

    def path(self, url: str) -> str:
        """The file that a URL names; fetched unless it is there.

        Raises:
            ValueError: It cannot be fetched, now or earlier in this run; the message names it and says why.
            RuntimeError: The folder cannot be written.
        """
        digest = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
        path = self.directory / digest[:2] / digest[2:]
        if not _renew(path):
            try:
                self._fetch_alone(url, path)
            except ValueError as error:
                raise ValueError(f"{url} was not fetched: {error}") from error
            except OSError as error:
                raise RuntimeError(
                    f"`data.media_url_dir` ({self.directory}) cannot be written: {error}; give it room, or"
                    " name another folder"
                ) from error
        return str(path)

    def _fetch_alone(self, url: str, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        with _locked(path.with_suffix(".failed")) as record:
            if path.exists():  # somebody else was fetching it
                return
            run_id, _, reason = record.read().partition("\n")
            if run_id == self._run_id:
                raise ValueError(reason)
            try:
                self._fetch(url, path)
                os.unlink(record.name)
            except ValueError as error:
                record.truncate(0)
                record.write(f"{self._run_id}\n{error}")
                raise

    def _fetch(self, url: str, path: Path) -> None:
        temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("wb") as file:
                download(url, file, self.limits)
                file.flush()
                os.fsync(file.fileno())  # else the name may survive a crash of the machine without content
            self._room.make(temporary.stat().st_size)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _own_folder() -> Path:
    """A folder that nobody else can write, wherever programs on this node put what they do not keep."""
    path = Path(tempfile.gettempdir()) / f"verl-media-urls-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()  # of a link it has all the bits of the mode
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RuntimeError(
            f"{path} is not a folder of this user alone: set `data.media_url_dir` to one where media from the"
            " web can be kept"
        )
    return path


def _renew(path: Path) -> bool:
    """Note that a file is read; its time of change stays, which tells contents apart. False if it is gone."""
    try:
        with suppress(PermissionError):  # another user's file can be read, not renewed
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    """Open a text file for reading and appending that no other process has open this way."""
    with path.open("a+", errors="backslashreplace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file
