# SPDX-License-Identifier: Apache-2.0
"""Decoded media and processor outputs, made once for all processes of a node.

Entries are safetensors files in one directory for each run, in shared memory where there is room. A process
that needs an entry maps the file; the pages are shared. Nobody serves the directory:

- an entry appears by rename, complete or not at all; two processes that want the same one wait for a file
  lock, so that one of them makes it;
- when the directory outgrows its bound, the oldest entries are unlinked; whoever has them mapped keeps them;
- every user of a directory holds a shared lock on its `alive` file, which the kernel drops when the process
  dies. The owner removes the directory when it closes, else the last user does; a directory that nobody holds
  is a dead run's and is removed by the next run on the node.
"""

import atexit
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from verl.utils.rank_logger import get_logger

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY = 4 << 30  # containers often have 64 MiB, which a single batch of images fills
MAX_BYTES = 32 << 30
LOCAL_BYTES = 1 << 30
PREFIX = "verl-media"
YOUNG_S = 60  # a directory without `alive` file may be about to get one

logger = get_logger(__name__)


class Entry(NamedTuple):
    """What is stored under one key: tensors, and plain values that JSON can hold."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def encode_entry(entry: Entry) -> bytes:
    """The safetensors file of an entry."""
    tensors = {name: tensor.contiguous() for name, tensor in entry.tensors.items()}
    return save(tensors, {"meta": json.dumps(entry.meta)})


def read_entry(path: Path) -> Entry | None:
    """The entry of a file, mapped and not copied; None if there is no file.

    `safe_open` opens what it is told twice, header first, and another process may make room in between: a
    name that this process holds open is there for both.

    Raises:
        SafetensorError: The file is damaged.
    """
    try:
        held = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        with safe_open(f"/proc/self/fd/{held}", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            return Entry(tensors, json.loads(file.metadata()["meta"]))
    finally:
        os.close(held)


class MediaCache:
    """A bounded store for the processes of a run on one node, with a small one inside each process.

    It can be pickled: the copy opens the directory of the same run on the node where it is unpickled.

    Example::

        cache = MediaCache("run-7", owner=True)
        entry = cache.get_or_make(key, lambda: Entry({"pixels": decode(path)}, {}))
        cache.close()

    Args:
        run_id: Names the run; equal in all its processes. None keeps entries in this process only.
        owner: Whether closing removes the directory at once.
        max_bytes: Bound of the directory; None takes a quarter of the free space, at most 32 GiB.
        local_bytes: Bound of what this process keeps open.
        root: Where the directory stands; None chooses shared memory, or the temporary folder if that is
            small.
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
        self.run_id, self.owner, self.max_bytes, self.local_bytes, self.root = (
            run_id, owner, max_bytes, local_bytes, root,
        )  # fmt: skip
        self._local: OrderedDict[str, Entry] = OrderedDict()
        self._local_size = 0
        self._unchecked: int | None = None  # bytes published since the directory was last measured
        self._process = os.getpid()
        self.directory: Path | None = None
        if run_id is not None:
            root = root or _choose_root()
            remove_stale_directories(root)
            self.directory = root / f"{PREFIX}-{os.getuid()}-{run_id}"
            self._bound = max_bytes or min(MAX_BYTES, shutil.disk_usage(root).free // 4)
            self._alive = _hold(self.directory)
            atexit.register(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.run_id, self.max_bytes, self.local_bytes, self.root)

    def get_or_make(self, key: str, make: Callable[[], Entry]) -> Entry:
        """The entry under `key`; if nobody made it yet, `make` is called and its result published.

        Args:
            key: Names the content and every option that shaped it; a valid file name.
            make: Called at most once for each key and node while the entry is kept. What it raises is passed
                on.
        """
        if key in self._local:
            self._local.move_to_end(key)
            return self._local[key]
        entry = make() if self.directory is None else self._get_or_publish(self.directory, key, make)
        self._keep(key, entry)
        return entry

    def get(self, key: str) -> Entry | None:
        """The entry under `key`, if somebody made it and it is still kept."""
        if key in self._local or self.directory is None:
            return self._local.get(key)
        entry = read_entry(self.directory / f"{key}.safetensors")
        if entry is not None:
            self._keep(key, entry)
        return entry

    def close(self) -> None:
        """Let go of the directory; the owner or the last user removes it. Harmless to repeat."""
        self._local.clear()
        self._local_size = 0
        if self.directory is None or self._process != os.getpid():
            return  # a forked child shares its parent's lock
        directory, self.directory = self.directory, None
        atexit.unregister(self.close)
        if self.owner or _try_lock(self._alive):
            shutil.rmtree(directory, ignore_errors=True)
        os.close(self._alive)

    def _get_or_publish(self, directory: Path, key: str, make: Callable[[], Entry]) -> Entry:
        path = directory / f"{key}.safetensors"
        entry = read_entry(path)
        if entry is not None:
            return entry
        try:
            with _locked(path.with_suffix(".lock")):
                entry = read_entry(path)
                if entry is None:
                    entry = make()
                    self._publish(path, entry)
                return entry
        except FileNotFoundError:
            if directory.is_dir():
                raise
            return make()  # the owner has closed the cache

    def _publish(self, path: Path, entry: Entry) -> None:
        self._evict(path.parent, entry.size)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        content = encode_entry(entry)
        try:
            temporary.write_bytes(content)
            temporary.rename(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno == errno.ENOENT and not path.parent.is_dir():
                return
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            logger.warning("no room to cache media: directory=%s bytes=%d", path.parent, len(content))

    def _evict(self, directory: Path, coming: int) -> None:
        """Unlink the oldest entries when the bound is near; processes measure it from time to time."""
        if self._unchecked is not None and self._unchecked + coming < self._bound // 16:
            self._unchecked += coming
            return
        self._unchecked = 0
        files = sorted(_sizes(directory), key=lambda file: file[1])
        total = sum(size for _, _, size in files) + coming
        for path, _, size in files:
            if total <= self._bound * 15 // 16:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _keep(self, key: str, entry: Entry) -> None:
        self._local[key] = entry
        self._local_size += entry.size
        while self._local_size > self.local_bytes and len(self._local) > 1:
            self._local_size -= self._local.popitem(last=False)[1].size


def remove_stale_directories(root: Path) -> None:
    """Remove this user's cache directories whose run is dead."""
    for directory in root.glob(f"{PREFIX}-{os.getuid()}-*"):
        try:
            alive = os.open(directory / "alive", os.O_RDWR)
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                if time.time() - directory.stat().st_mtime > YOUNG_S:
                    shutil.rmtree(directory, ignore_errors=True)
            continue
        except NotADirectoryError:
            continue
        try:
            if _try_lock(alive):
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(alive)


def _reopen(run_id: str | None, max_bytes: int | None, local_bytes: int, root: Path | None) -> MediaCache:
    return MediaCache(run_id, max_bytes=max_bytes, local_bytes=local_bytes, root=root)


def _choose_root() -> Path:
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    large = usable and shutil.disk_usage(SHARED_MEMORY).total >= MIN_SHARED_MEMORY
    return SHARED_MEMORY if large else Path(tempfile.gettempdir())


def _hold(directory: Path) -> int:
    """Make the directory and hold its `alive` file; again, if a sweep removed it in between."""
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
    """Hold a lock file while the block runs; its removal at the end can at worst make work twice."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _sizes(directory: Path) -> Iterator[tuple[Path, float, int]]:
    with suppress(FileNotFoundError):
        for file in os.scandir(directory):
            with suppress(FileNotFoundError):
                if file.name.endswith(".safetensors"):
                    status = file.stat()
                    yield Path(file.path), status.st_mtime, status.st_size
