# SPDX-License-Identifier: Apache-2.0
"""State of a run, by the lock that it holds on `run.lock` in its folder until it ends and removes the file.

Must not be called in the process of the run: closing any descriptor of a file releases the locks that the
process holds on it.
"""

import errno
import fcntl
import os
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

LOCK_FILE = "run.lock"
RUNNING, ENDED, KILLED, UNKNOWN = "running", "ended", "killed", "unknown"
FLOCK = "hhqqi4x"  # Linux: l_type, l_whence, l_start, l_len, l_pid
QUIET = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a link or a pipe may be in its place


def run_state(folder: Path) -> str:
    """Return `running`, `ended`, `killed` (it left its lock file), or `unknown` without locks to ask for."""
    try:
        descriptor = os.open(folder / LOCK_FILE, QUIET)
    except OSError as error:
        return ENDED if error.errno == errno.ENOENT else UNKNOWN
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or sys.platform != "linux":
            return UNKNOWN
        return RUNNING if _is_locked(descriptor) else KILLED
    except OSError:  # a file system without locks
        return UNKNOWN
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    # Asks without locking: a lock held for an instant would make a run that starts in it fail.
    question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    return struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK
