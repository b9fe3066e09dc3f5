# SPDX-License-Identifier: Apache-2.0
"""Confine a process before it runs a program: its root, privileges, resources, files and system calls."""

import contextlib
import math
import os
import resource
import shutil
import signal
import struct

from verl.sandbox import filter, kernel

MIB = 1 << 20
READ_ANY_FILE = 1 << 2  # CAP_DAC_READ_SEARCH
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
STACK_MB = 64  # of the main thread, where the limits of this process allow it

# Namespaces have a root folder that holds only the interpreter's library and an empty folder. An ordinary
# user may create all of them: user, mount, process, network, IPC, host name and cgroup namespaces.
NOBODY = 65534
FOLDER = "/box"  # the program's working folder
MAX_FILES = 4096  # in the working folder
ROOT_MB = 1  # for the tree of empty mount points

# Landlock: restricts the file system for a process that may not create namespaces.
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1
OLDEST_VERSION = 3  # older ones let files be truncated that cannot be written (Linux 6.2)
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
ALL_OF_VERSION = {3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}  # rights over files


def confine(limits: dict, user: int, readable: list[str] | None, num_threads: int) -> None:
    """Drop all privileges, irrevocably, and become `user`, if this process may choose.

    Landlock leaves only the paths `readable` readable; with None a separate root folder does that.
    """
    _become(user, keep=READ_ANY_FILE if readable is not None else 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    limit_resources(limits, num_threads)
    if readable is not None:
        allow_reading_only(readable, DEVICES)
    filter.install(alone=limits["processes"] == 1)


def _become(user: int, keep: int) -> None:
    """Switch to another user if this is root, and drop every capability that is not in `keep`."""
    # Root's interpreter may be in a home folder that only root can enter. Landlock decides what can be read
    # whoever the user is, so the right to pass such folders adds nothing else.
    keep = keep if os.geteuid() == 0 else 0
    for capability in range(kernel.NUM_CAPABILITIES):
        with contextlib.suppress(OSError):  # unknown, or not ours to drop: `no_new_privs` covers it
            kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
    if os.geteuid() == 0 and user != 0:
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("Ii", kernel.CAPABILITY_VERSION_3, 0)  # `struct __user_cap_header_struct`
    kernel.syscall("capset", header, struct.pack("6I", keep, keep, 0, 0, 0, 0))  # effective, permitted, ...


def limit_resources(limits: dict, num_threads: int | None) -> None:
    """Limit this process and its children; `num_threads` bounds all of the user's. Lower limits stay."""
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
    cpu_s = math.ceil(limits["cpu_s"])
    _lower(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # SIGXCPU, then SIGKILL


def _lower(which: int, soft: int, hard: int) -> None:
    highest = resource.getrlimit(which)[1]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(which, (soft, hard))


def allow_reading_only(paths: list[str], devices: list[str]) -> None:
    """Restrict this process for good to reading files at or below `paths` and using devices.

    It can still see that a file exists, its size and its times.
    """
    version = kernel.syscall("landlock_create_ruleset", None, 0, CREATE_RULESET_VERSION)
    if version < OLDEST_VERSION:
        raise OSError(f"Landlock has version {version}, the sandbox needs {OLDEST_VERSION} (Linux 6.2)")
    # The first version of `struct landlock_ruleset_attr`: rights over files.
    attributes = struct.pack("Q", ALL_OF_VERSION[min(version, max(ALL_OF_VERSION))])
    ruleset = kernel.syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    for path in paths:
        _allow(ruleset, path, READ_FILE | (READ_DIR if os.path.isdir(path) else 0))
    for device in devices:
        _allow(ruleset, device, READ_FILE | WRITE_FILE)
    kernel.syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, opened)  # `struct landlock_path_beneath_attr`
    kernel.syscall("landlock_add_rule", ruleset, RULE_PATH_BENEATH, rule, 0)
    os.close(opened)


def build_root(scratch: str, readable: list[str], stdin: int, folder_mb: int, owner: int) -> None:
    """Replace the root folder.

    The new root is mounted on the folder `scratch`. It has the real paths `readable`, /dev/stdin with the
    content of the file descriptor `stdin`, and a working folder of `folder_mb` MiB that belongs to `owner`.
    """
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    size = ROOT_MB * MIB + os.fstat(stdin).st_size
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", scratch, "tmpfs", flags, f"size={size},mode=0755")
    os.chdir(scratch)
    os.mkdir("old")
    kernel.syscall("pivot_root", b".", b"old")
    os.chdir("/")
    for path in readable:
        _show(path)
    for device in DEVICES:
        _show(device, devices=True)
    with open("/dev/stdin", "wb") as copy, open(stdin, "rb", closefd=False) as given:
        shutil.copyfileobj(given, copy)
    os.mkdir(FOLDER)
    options = f"size={folder_mb}m,nr_inodes={MAX_FILES},mode=0700,uid={owner},gid={owner}"
    kernel.mount("tmpfs", FOLDER, "tmpfs", flags | kernel.MS_NOEXEC, options)
    kernel.unmount("/old")
    os.rmdir("/old")
    kernel.protect_mount("/", recursive=False)
    os.chdir(FOLDER)


def _show(path: str, *, devices: bool = False) -> None:
    source = f"/old{path}"
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC))
    kernel.mount(source, path, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.protect_mount(path, recursive=True, devices=devices)
