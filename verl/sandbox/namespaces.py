# SPDX-License-Identifier: Apache-2.0
"""Namespaces with a root folder that holds only the interpreter's library and an empty folder.

An ordinary user may create all of them: user, mount, process, network, IPC, host name and cgroup namespaces.
"""

import os
import shutil

from verl.sandbox import kernel
from verl.sandbox.confinement import DEVICES

NOBODY = 65534
FOLDER = "/box"  # the program's working folder
MAX_FILES = 4096  # in the working folder
ROOT_MB = 1  # for the tree of empty mount points


def build_root(scratch: str, readable: list[str], stdin: int, folder_mb: int, owner: int) -> None:
    """Replace the root folder.

    The new root is mounted on the folder `scratch`. It has the real paths `readable`, /dev/stdin with the
    content of the file descriptor `stdin`, and a working folder of `folder_mb` MiB that belongs to `owner`.
    """
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    size = ROOT_MB * (1 << 20) + os.fstat(stdin).st_size
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
