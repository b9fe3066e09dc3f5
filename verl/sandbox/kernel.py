# SPDX-License-Identifier: Apache-2.0
"""System calls without a function in Python, and the numbers of the calls allowed to a program."""

import ctypes
import os
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

AUDIT_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMNS = {"x86_64": 0, "aarch64": 1}

# Name: (x86_64, aarch64); None where an architecture has no such call.
FREE = {  # allowed with any arguments: files, memory, signals, processes, time
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "lseek": (8, 62), "close": (3, 57),
    "close_range": (436, 436), "open": (2, None), "openat": (257, 56), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "ftruncate": (77, 46),
    "fallocate": (285, 47), "fsync": (74, 82), "fdatasync": (75, 83), "flock": (73, 32), "umask": (95, 166),
    "fadvise64": (221, 223), "statfs": (137, 43), "fstatfs": (138, 44), "copy_file_range": (326, 285),
    "sendfile": (40, 71), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "recvfrom": (45, 207), "mmap": (9, 222), "munmap": (11, 215),
    "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214),
    "membarrier": (324, 283), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "setitimer": (38, 103), "getitimer": (36, 102),
    "alarm": (37, None), "pause": (34, None), "futex": (202, 98), "set_robust_list": (273, 99),
    "rseq": (334, 293), "set_tid_address": (218, 96), "gettid": (186, 178), "getpid": (39, 172),
    "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "exit": (60, 93),
    "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95), "restart_syscall": (219, 128),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "getpriority": (140, 141), "getcpu": (309, 168),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrandom": (318, 278), "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165),
    "getrlimit": (97, 163), "arch_prctl": (158, None),
}  # fmt: skip
SPECIAL = {  # allowed with certain arguments only, or used to build the sandbox
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "kill": (62, 129), "tgkill": (234, 131),
    "tkill": (200, 130), "fcntl": (72, 25), "ioctl": (16, 29), "prctl": (157, 167), "prlimit64": (302, 261),
    "socketpair": (53, 199), "sendto": (44, 206), "pivot_root": (155, 41), "mount_setattr": (442, 442),
    "capset": (126, 91), "seccomp": (317, 277), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip
NUMBERS = FREE | SPECIAL

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP, CLONE_THREAD = 0x02000000, 0x00010000
NEW_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NAME, PR_CAPBSET_DROP = 1, 4, 8, 15, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
CAPABILITY_VERSION_3 = 0x20080522
NUM_CAPABILITIES = 64


def number(name: str) -> int | None:
    """Number of a system call on this machine; None if it has no such call."""
    return NUMBERS[name][COLUMNS[os.uname().machine]]


def is_known_machine() -> bool:
    """Return whether the numbers above are valid on this machine."""
    return sys.platform == "linux" and os.uname().machine in COLUMNS


def _check(result: int, what: str) -> int:
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")
    return result


def syscall(name: str, *arguments: int | bytes | None) -> int:
    """Make a system call; integers are passed as 64 bits, bytes (a text or structure) by reference."""
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check(LIBC.syscall(ctypes.c_long(number(name) or -1), *passed), name)


def prctl(option: int, *values: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _check(LIBC.prctl(option, *padded), f"prctl {option}")


def unshare(flags: int) -> None:
    _check(LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind)]
    data = options.encode() if options else None
    _check(LIBC.mount(*texts, ctypes.c_ulong(flags), data), f"mount {source or kind} on {target}")


def unmount(target: str) -> None:
    """Detach a mount and everything below it, even if it is in use."""
    _check(LIBC.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def protect_mount(target: str, *, recursive: bool, devices: bool = False) -> None:
    """Make a mount read-only, without set-user-id programs and, unless `devices`, without devices."""
    rights = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | (0 if devices else MOUNT_ATTR_NODEV)
    attributes = struct.pack("4Q", rights, 0, 0, 0)  # `struct mount_attr`: set, clear, propagation, users
    at_fdcwd, at_recursive = -100, 0x8000
    flags = at_recursive if recursive else 0
    syscall("mount_setattr", at_fdcwd, target.encode(), flags, attributes, len(attributes))
