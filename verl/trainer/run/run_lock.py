# SPDX-License-Identifier: Apache-2.0
"""Lock a folder of checkpoints and log files against a second run. Imports no torch.

The lock is on `run.lock` in the folder and belongs to a process (`fcntl.lockf`): the kernel releases it
however the process ends, forked processes do not inherit it, and NFS shows it to other machines.

The file has two bytes to lock. The command locks the first one. The child that trains under
`trainer.max_restarts` locks the second one, because it saves its step after the command was killed.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl.config.trainer import RunConfig
from verl.utils.rank_logger import get_logger

FILE = "run.lock"
COMMAND, CHILD = 0, 1  # bytes of the file
HELD = (errno.EACCES, errno.EAGAIN)
MAX_TRIES = 10  # to lock a file that another run removes at its end
MAX_NOTE = 1000  # bytes that a holder writes about itself

logger = get_logger(__name__)


@contextmanager
def locked_run_folder(trainer: RunConfig) -> Iterator[None]:
    """Lock the run's folder inside the block; raise `ValueError` if another run holds it."""
    folder = Path(trainer.checkpoint_folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        descriptor = _acquire(folder)
        try:
            yield
        finally:
            _release(descriptor, folder)
    finally:
        for path in made:
            with suppress(OSError):  # it is not empty: only folders of a run that wrote nothing go
                path.rmdir()


@contextmanager
def locked_by_child(trainer: RunConfig) -> Iterator[None]:
    """Keep the folder locked even if the command that locked it is killed."""
    descriptor = os.open(Path(trainer.checkpoint_folder, FILE), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):  # the command has warned that this file system has no locks
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, CHILD)
            _write_note(descriptor, f"pid {os.getppid()} (its controller is pid {os.getpid()})")
        yield
    finally:
        os.close(descriptor)


def _acquire(folder: Path) -> int:
    """Lock the file, which is made if missing; return its descriptor."""
    descriptor = _open(folder)
    for _ in range(MAX_TRIES):
        if not _lock(descriptor, folder):
            holder = os.pread(descriptor, MAX_NOTE, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise ValueError(
                f"`trainer.save_checkpoint_path` ({folder}) must be a folder that no other run writes, but"
                f" {holder or 'another process'} does: end that run, or give this one its own name"
                " (`trainer.experiment_name=...`) or another folder"
            )
        if _is_in_place(descriptor, folder):
            break
        os.close(descriptor)
        descriptor = _open(folder)
    with suppress(OSError):  # a full disk: the lock itself is enough
        _write_note(descriptor, f"pid {os.getpid()}")
    return descriptor


def _open(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OSError(
            f"`trainer.save_checkpoint_path` ({folder}) must be a folder that can be written, but its"
            f" {FILE} cannot: {error.strerror}"
        ) from error


def _lock(descriptor: int, folder: Path) -> bool:
    """Lock the first byte if both bytes are free; return False if another process holds one."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 2, COMMAND)
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, CHILD)
    except OSError as error:
        if error.errno in HELD:
            return False
        logger.warning(
            "a file system without locks, a second run in its folder would not be noticed: path=%s cause=%s",
            folder, error.strerror,
        )  # fmt: skip
    return True


def _is_in_place(descriptor: int, folder: Path) -> bool:
    """Return whether the open file is still the folder's: the run that held it may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / FILE))
    except FileNotFoundError:
        return False


def _write_note(descriptor: int, holder: str) -> None:
    text = f"{holder} on {socket.gethostname()} (since {time.strftime('%Y-%m-%d %H:%M:%S')})\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)  # other machines see it while the file stays open


def _release(descriptor: int, folder: Path) -> None:
    with suppress(OSError):  # a child that still trains keeps the file, and so does a removed folder
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, CHILD)
        (folder / FILE).unlink()
    os.close(descriptor)
