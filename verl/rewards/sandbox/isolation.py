# SPDX-License-Identifier: Apache-2.0
"""What this machine has to contain a program, found out once by trying."""

import os
from enum import StrEnum


class Isolation(StrEnum):
    """How a program is contained."""

    NAMESPACES = "namespaces"  # a root folder, processes and network of its own; and seccomp
    LANDLOCK = "landlock"  # Landlock and seccomp: no namespaces, no folder to write in, one process
    NONE = "none"  # resource limits only: not against malice


UNSAFE_VARIABLE = "VERL_SANDBOX_UNSAFE"
REMEDY = (
    "give the machine one of them (user namespaces: `sysctl user.max_user_namespaces`,"
    " `kernel.apparmor_restrict_unprivileged_userns=0`, or in a container a seccomp profile that allows"
    " `unshare`; Landlock: Linux 6.2 with `landlock` among its `lsm=`), or, for programs that you trust, set"
    f" {UNSAFE_VARIABLE}=1"
)


def is_unsafe_allowed() -> bool:
    """Whether the user said that programs may run without isolation."""
    return os.environ.get(UNSAFE_VARIABLE) == "1"
