# SPDX-License-Identifier: Apache-2.0
"""State files of `verl-longvideo-reason`: an interrupted command continues from them.

A file appears complete or not at all, and holds the digest of all that it was made from: one that was made
from something else counts as missing and is made again.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import write_json

LOCK = "lock"
HELD = (errno.EACCES, errno.EAGAIN)


def digest_of(*facts: Any) -> str:
    """Return a short digest of plain values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def read_state(path: Path, digest: str) -> dict[str, Any] | None:
    """Return the content of a file; None if it is missing, damaged, or made from something else."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("digest") == digest else None


def write_state(path: Path, digest: str, content: dict[str, Any]) -> None:
    """Write a file of the state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"digest": digest} | content)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other commands out of a folder, which is made if missing; raise a ValueError if one is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in HELD:
                raise
            raise ValueError(f"`--out` ({folder}) is used by another command that runs") from error
        yield
    finally:
        os.close(descriptor)
