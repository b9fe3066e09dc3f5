# SPDX-License-Identifier: Apache-2.0
"""Decoded media and processor outputs as safetensors files in bounded directories.

`MediaFolder` is one directory that all processes which see it share, kept from run to run: decoded frames
(`data.cache_dir`) or outputs of a frozen vision tower (`worker.actor.cached_embeds_dir`). `MediaCache` is the
cache of one run on one node: a `MediaFolder` in shared memory, with a small store inside each process.
"""

import atexit
import fcntl
import json
import os
import re
import shutil
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from verl.utils.rank_logger import get_logger
from verl.utils.shared_folder import Room, write_whole

FILE = re.compile(r"[0-9a-f]{30,126}\.safetensors")
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY = 4 << 30  # containers often have 64 MiB, which a single batch of images fills
MAX_BYTES = 32 << 30
LOCAL_BYTES = 1 << 30
PREFIX = "verl-media"
QUIET_S = 600.0  # between warnings of a process that there is no room: a batch may have thousands of files
YOUNG_S = 60  # a directory without an `alive` file may be about to get one

logger = get_logger(__name__)


class Entry(NamedTuple):
    """Tensors and JSON values under one key."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def encode_entry(entry: Entry) -> bytes:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in entry.tensors.items()}
    meta = json.dumps(entry.meta)
    return save(tensors, {"meta": meta, "crc32": _checksum(tensors, meta)})


def read_entry(path: Path, *, is_checked: bool = True) -> Entry | None:
    """Map the entry of a file into memory; None if there is no file.

    Raises:
        ValueError: The file was cut off or, if `is_checked`, overwritten; 4 GB are checked in a second.
    """
    try:
        opened = path.open("rb")
    except FileNotFoundError:
        return None
    # `safe_open` opens the path twice, and another process may remove it in between: an open descriptor stays
    # valid for both.
    try:
        with opened, safe_open(f"/proc/self/fd/{opened.fileno()}", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    meta = metadata.get("meta", "")
    if is_checked and metadata.get("crc32") != _checksum(tensors, meta):
        raise ValueError("its content has changed since it was written (crc32)")
    return Entry(tensors, json.loads(meta))


def _checksum(tensors: dict[str, Tensor], meta: str) -> str:
    checksum = zlib.crc32(meta.encode())
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


class MediaFolder:
    """A bounded folder of entries, shared by processes without locks; entries unread for longest go first.

    Args:
        max_bytes: Bound of the folder (see `Room`).
        is_temporary: The directory belongs to one run: files need not survive a system crash, and nothing is
            written once the directory is removed.
    """

    def __init__(
        self, directory: str | Path, max_bytes: int | None = None, *, is_temporary: bool = False
    ) -> None:
        self.directory, self.is_temporary = Path(directory).absolute(), is_temporary
        self.directory.mkdir(parents=True, exist_ok=True)
        self._room = Room(self.directory, FILE, max_bytes)
        self._lost, self._quiet_until = 0, 0.0  # files for which there was no room; when to say so again

    def get_or_make(self, key: str, make: Callable[[], Entry]) -> Entry:
        """Return the entry under `key`, a hexadecimal digest; if missing, keep the result of `make`."""
        entry = self.get(key)
        if entry is None:
            entry = make()
            if not self.is_temporary or self.directory.is_dir():
                self._write(key, encode_entry(entry))
        return entry

    def get(self, key: str) -> Entry | None:
        path = self._path(key)
        try:
            # That of one run needs no check: no one else writes there, and a crash of the system removes it.
            entry = read_entry(path, is_checked=not self.is_temporary)
        except ValueError as error:
            logger.warning("a damaged file of the media cache is replaced: path=%s cause=%s", path, error)
            return None
        with suppress(FileNotFoundError, PermissionError):  # removed since, or another user's
            os.utime(path)
        return entry

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key[2:]}.safetensors"

    def _write(self, key: str, content: bytes) -> None:
        if write_whole(self._path(key), content, self._room.make, is_durable=not self.is_temporary):
            return
        self._lost += 1
        if time.monotonic() >= self._quiet_until:
            logger.warning("no room to cache media: path=%s files=%d", self.directory, self._lost)
            self._quiet_until = time.monotonic() + QUIET_S


class MediaCache:
    """A bounded cache for the processes of a run on one node, and a small one inside each process.

    Threads may share it. An unpickled copy opens the directory of the same run on its own node.

    Args:
        run_id: Equal in all processes of a run; None keeps entries in this process only.
        owner: Closing removes the directory at once; otherwise the last user does.
        max_bytes: Bound of the directory; None is a quarter of the free space, at most 32 GiB.
        local_bytes: Bound of the entries that this process keeps open.
        root: Parent of the directory; None is shared memory, or the temporary folder if that is too small.
    """

    def __init__(
        self,
        run_id: str | None,
        *,
        owner: bool = False,
        max_bytes: int | None = None,
        local_bytes: int = LOCAL_BYTES,
        root: Path | None = None,
    ) -> None:
        self.run_id, self.owner, self.root = run_id, owner, root
        self.max_bytes, self.local_bytes = max_bytes, local_bytes
        self._local: OrderedDict[str, Entry] = OrderedDict()
        self._local_size, self._lock, self._process = 0, threading.Lock(), os.getpid()
        self._folder: MediaFolder | None = None
        if run_id is not None:
            root = root or _choose_root()
            remove_stale_directories(root)
            directory = root / f"{PREFIX}-{os.getuid()}-{run_id}"
            self._alive = _hold(directory)
            bound = max_bytes or min(MAX_BYTES, shutil.disk_usage(root).free // 4)
            self._folder = MediaFolder(directory, bound, is_temporary=True)
            atexit.register(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        reopen = partial(MediaCache, max_bytes=self.max_bytes, local_bytes=self.local_bytes, root=self.root)
        return reopen, (self.run_id,)

    @property
    def directory(self) -> Path | None:
        """The directory on this node; None without a run and after `close`."""
        return None if self._folder is None else self._folder.directory

    def get_or_make(self, key: str, make: Callable[[], Entry]) -> Entry:
        """Return the entry under `key`, a hexadecimal digest; if missing, one process makes it."""
        entry = self.get(key)
        if entry is None:
            entry = make() if self._folder is None else self._make_once(self._folder, key, make)
            self._keep(key, entry)
        return entry

    def get(self, key: str) -> Entry | None:
        with self._lock:
            if key in self._local:
                self._local.move_to_end(key)
                return self._local[key]
        entry = None if self._folder is None else self._folder.get(key)
        if entry is not None:
            self._keep(key, entry)
        return entry

    def close(self) -> None:
        """Release the directory; the owner or the last user removes it."""
        with self._lock:
            self._local, self._local_size = OrderedDict(), 0
        if self._folder is None or self._process != os.getpid():
            return  # a forked child shares its parent's lock
        directory, self._folder = self._folder.directory, None
        atexit.unregister(self.close)
        if self.owner or _try_lock(self._alive):
            shutil.rmtree(directory, ignore_errors=True)
        os.close(self._alive)

    def _make_once(self, folder: MediaFolder, key: str, make: Callable[[], Entry]) -> Entry:
        try:
            with _locked(folder.directory / f"{key}.lock"):
                return folder.get_or_make(key, make)
        except FileNotFoundError:
            if folder.directory.is_dir():
                raise
            return make()  # the owner has closed the cache

    def _keep(self, key: str, entry: Entry) -> None:
        with self._lock:
            self._local_size += entry.size - (self._local[key].size if key in self._local else 0)
            self._local[key] = entry
            while self._local_size > self.local_bytes and len(self._local) > 1:
                self._local_size -= self._local.popitem(last=False)[1].size


def remove_stale_directories(root: Path) -> None:
    """Remove this user's cache directories of dead runs."""
    for directory in root.glob(f"{PREFIX}-{os.getuid()}-*"):
        try:
            alive = os.open(directory / "alive", os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            with suppress(FileNotFoundError):
                if time.time() - directory.stat().st_mtime > YOUNG_S:
                    shutil.rmtree(directory, ignore_errors=True)  # leaves a file alone
            continue
        try:
            if _try_lock(alive):
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(alive)


def _choose_root() -> Path:
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    large = usable and shutil.disk_usage(SHARED_MEMORY).total >= MIN_SHARED_MEMORY
    return SHARED_MEMORY if large else Path(tempfile.gettempdir())


def _hold(directory: Path) -> int:
    # Every user of a directory holds a shared lock on its `alive` file, which the kernel releases when the
    # process dies: a directory without locks belongs to a dead run. Repeat if one was removed in between.
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            alive = os.open(directory / "alive", os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue
        fcntl.flock(alive, fcntl.LOCK_SH)
        try:
            if os.fstat(alive).st_ino == os.stat(directory / "alive").st_ino:
                return alive
        except FileNotFoundError:
            pass
        os.close(alive)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Removing the file lets a third process lock a new one: at worst an entry is made twice.
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)
