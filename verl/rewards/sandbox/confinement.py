# SPDX-License-Identifier: Apache-2.0
"""What a process gives up before it runs a program: privileges, resources, system calls."""

import contextlib
import ctypes
import os
import resource
import signal

from verl.rewards.sandbox import filter, kernel, landlock

MIB = 1 << 20
READ_ANY_FILE = 1 << 2  # CAP_DAC_READ_SEARCH
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
STACK_MB = 64  # of the main thread, where the limits of this process allow it


class CapabilityHeader(ctypes.Structure):
    """`struct __user_cap_header_struct`."""

    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class CapabilityData(ctypes.Structure):
    """Two `struct __user_cap_data_struct`."""

    _fields_ = [("words", ctypes.c_uint32 * 6)]


def confine(limits: dict, user: int, *, readable: list[str] | None, num_threads: int) -> None:
    """Give up everything; nothing of it can be had back.

    Args:
        limits: The fields of `Limits`.
        user: Whom to become, where this process may choose.
        readable: What Landlock leaves to be read; None where a root folder of its own does that.
        num_threads: Threads that the user may have, of all processes.

    Raises:
        OSError: Something could not be given up.
    """
    _become(user, keep=READ_ANY_FILE if readable is not None else 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    limit_resources(limits, num_threads)
    if readable is not None:
        landlock.allow_reading_only(readable, DEVICES)
    filter.install(alone=limits["processes"] == 1)


def _become(user: int, keep: int) -> None:
    """Become another user where this is the superuser, and drop every capability but those in `keep`.

    A superuser's interpreter may stand in a home folder that only the superuser can enter. Landlock allows
    to read what it allows whoever one is, so the right to pass such folders gives nothing else.
    """
    keep = keep if os.geteuid() == 0 else 0
    for capability in range(kernel.NUM_CAPABILITIES):
        with contextlib.suppress(OSError):  # no such one; or not ours to drop: then `no_new_privs` does it
            kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
    if os.geteuid() == 0 and user != 0:
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
    rights = CapabilityData((ctypes.c_uint32 * 6)(keep, keep))  # effective, permitted
    kernel.syscall("capset", CapabilityHeader(kernel.CAPABILITY_VERSION_3, 0), rights)


def limit_resources(limits: dict, num_threads: int | None) -> None:
    """Set the limits of this process and of what it starts; lower ones that it has already stay."""
    memory = limits["memory_mb"] * MIB
    wanted = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_FSIZE: limits["folder_mb"] * MIB,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_STACK: STACK_MB * MIB,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if num_threads is not None:
        wanted[resource.RLIMIT_NPROC] = num_threads
    for which, value in wanted.items():
        _lower(which, value, value)
    _lower(resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1)  # SIGXCPU, then SIGKILL


def _lower(which: int, soft: int, hard: int) -> None:
    highest = resource.getrlimit(which)[1]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(which, (soft, hard))
