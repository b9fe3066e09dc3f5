# SPDX-License-Identifier: Apache-2.0
"""A program's view of this machine: libraries of the interpreter and the system, and a user."""

import os
import sys
import sysconfig
import threading
from functools import cache

SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
LAST_DYNAMIC_USER = 65519  # end of a range of unused UIDs, which systemd reserves for services
NUM_DYNAMIC_USERS = 4096


@cache
def import_path() -> list[str]:
    """Folders of the installed packages. The child knows those of the standard library."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


@cache
def readable_paths() -> list[str]:
    """Paths that a program may read, none inside another."""
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    libraries = [f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib"]
    wanted = [path for path in (*SYSTEM, *standard, *libraries, *import_path()) if os.path.exists(path)]
    # Real paths too, so that symbolic links need not be followed.
    paths = sorted({os.path.abspath(path) for path in wanted} | {os.path.realpath(path) for path in wanted})
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def unused_user() -> int:
    """Return a user for the run that this thread waits for: runs at the same time share no limit."""
    return LAST_DYNAMIC_USER - threading.get_native_id() % NUM_DYNAMIC_USERS


def threads_of_user(user: int) -> int:
    """Number of threads of a user on this machine, as far as this process can see."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == user:
                    total += len(os.listdir(f"{entry.path}/task"))
            except OSError:  # it has ended
                continue
    return total
