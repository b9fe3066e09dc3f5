# SPDX-License-Identifier: Apache-2.0
"""What the sandbox shows of this machine: the running interpreter's library and the system's."""

import os
import sys
import sysconfig
from functools import cache

SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
LAST_DYNAMIC_USER = 65519  # users that nobody has, set aside for services by systemd's convention
NUM_DYNAMIC_USERS = 4096


@cache
def import_path() -> list[str]:
    """Folders of the installed packages; the standard library's are known to the child."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


@cache
def readable_paths() -> list[str]:
    """Every path that a program may read, by its name and by its real one, none of them inside another.

    The name and the real path of a folder are shown both, so that symbolic links need not be followed.
    """
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    libraries = [f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib"]
    wanted = [path for path in (*SYSTEM, *standard, *libraries, *import_path()) if os.path.exists(path)]
    paths = sorted({os.path.abspath(path) for path in wanted} | {os.path.realpath(path) for path in wanted})
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def unused_user() -> int:
    """A user that nobody is, for a superuser to become; another one for each process."""
    return LAST_DYNAMIC_USER - os.getpid() % NUM_DYNAMIC_USERS


def threads_of_user(user: int) -> int:
    """How many threads a user has on this machine, as far as this process can see."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == user:
                    total += len(os.listdir(f"{entry.path}/task"))
            except OSError:  # it has ended
                continue
    return total
