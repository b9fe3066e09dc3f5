# SPDX-License-Identifier: Apache-2.0
"""Keeps two runs out of one folder of checkpoints and log files; imports no torch.

A run holds a lock on `run.lock` in its folder, of the kind that belongs to a process (`fcntl.lockf`): the
kernel drops it however the process ends, processes that were forked from it do not inherit it, and NFS hands
it on to other machines. A file system that knows no locks costs a warning, not the run.

The file has two places to hold. The command holds the first. The child that trains under
`trainer.max_restarts` holds the second, for it saves its step after the command was killed.
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
COMMAND, CHILD = 0, 1  # places in the file
HELD = (errno.EACCES, errno.EAGAIN)
TRIES = 10  # at a file that another run removes at its end
LONGEST_NOTE = 1000  # bytes of what a holder writes about itself

logger = get_logger(__name__)


@contextmanager
def held_folder(trainer: RunConfig) -> Iterator[None]:
    """Keep other runs out of the run's folder inside the block; folders that stay empty go again.

    Raises:
        ValueError: Another run holds it.
        OSError: It cannot be written.
    """
    folder = Path(trainer.checkpoint_folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        descriptor = _take(folder)
        try:
            yield
        finally:
            _give_back(descriptor, folder)
    finally:
        for path in made:
            with suppress(OSError):  # it holds something by now, or was removed
                path.rmdir()


@contextmanager
def held_by_child(trainer: RunConfig) -> Iterator[None]:
    """Keep other runs out, also once the command that holds the folder was killed; released by the end."""
    descriptor = os.open(Path(trainer.checkpoint_folder, FILE), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):  # the command has said that this file system knows no locks
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, CHILD)
            _introduce(descriptor, f"pid {os.getppid()} (its controller is pid {os.getpid()})")
        yield
    finally:
        os.close(descriptor)


def _take(folder: Path) -> int:
    """Lock the file, which is made if missing; returns its descriptor."""
    descriptor = _open(folder)
    for _ in range(TRIES):
        if not _lock(descriptor, folder):
            holder = os.pread(descriptor, LONGEST_NOTE, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise ValueError(
                f"`trainer.save_checkpoint_path` ({folder}) must be a folder that no other run writes, but"
                f" {holder or 'another process'} does: end that run, or give this one a name of its own"
                " (`trainer.experiment_name=...`) or another folder"
            )
        if _is_in_place(descriptor, folder):
            break
        os.close(descriptor)
        descriptor = _open(folder)
    with suppress(OSError):  # no room: the lock says enough
        _introduce(descriptor, f"pid {os.getpid()}")
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
    """Whether nobody else holds the file; from now on this process does."""
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
    """Whether what was opened is still the folder's file: the run that held it may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / FILE))
    except FileNotFoundError:
        return False


def _introduce(descriptor: int, who: str) -> None:
    text = f"{who} on {socket.gethostname()} (since {time.strftime('%Y-%m-%d %H:%M:%S')})\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)  # other machines see it while the file stays open


def _give_back(descriptor: int, folder: Path) -> None:
    with suppress(OSError):  # a child that trains on keeps the file, as does a folder that is gone
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, CHILD)
        (folder / FILE).unlink()
    os.close(descriptor)
