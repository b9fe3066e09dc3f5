# SPDX-License-Identifier: Apache-2.0
"""Landlock: what an unprivileged process gives up of the file system, where it may have no namespaces."""

import ctypes
import os

from verl.rewards.sandbox import kernel

CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1
OLDEST_VERSION = 3  # older ones let files be truncated that cannot be written (Linux 6.2)
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
ALL_OF_VERSION = {3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}  # rights over files


class Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr`, as far as its first version goes: rights over files."""

    _fields_ = [("files", ctypes.c_uint64)]


class PathRule(ctypes.Structure):
    """`struct landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def allow_reading_only(paths: list[str], devices: list[str]) -> None:
    """Give up, for good, every right over files but to read what is at or below `paths` and to use devices.

    That a file exists, its size and its times can still be seen.

    Raises:
        OSError: The kernel's Landlock is missing or older than Linux 6.2.
    """
    version = kernel.syscall("landlock_create_ruleset", None, 0, CREATE_RULESET_VERSION)
    if version < OLDEST_VERSION:
        raise OSError(f"Landlock has version {version}, the sandbox needs {OLDEST_VERSION} (Linux 6.2)")
    attributes = Ruleset(ALL_OF_VERSION[min(version, max(ALL_OF_VERSION))])
    ruleset = kernel.syscall("landlock_create_ruleset", attributes, ctypes.sizeof(attributes), 0)
    for path in paths:
        _allow(ruleset, path, READ_FILE | (READ_DIR if os.path.isdir(path) else 0))
    for device in devices:
        _allow(ruleset, device, READ_FILE | WRITE_FILE)
    kernel.syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    kernel.syscall("landlock_add_rule", ruleset, RULE_PATH_BENEATH, PathRule(rights, opened), 0)
    os.close(opened)
