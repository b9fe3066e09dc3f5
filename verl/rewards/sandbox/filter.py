# SPDX-License-Identifier: Apache-2.0
"""A seccomp filter of the system calls that a program may make. It is permanent and inherited.

It allows files (which the file system or Landlock restricts), memory, signals, time and threads. A program
cannot execute another one, open sockets except pairs within the process, trace or inspect processes, or mount
file systems.
"""

import ctypes
import errno
import os
import struct

from verl.rewards.sandbox import kernel

ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_ARCH, AT_ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`
X32_BIT = 0x40000000
FIRST_NEW_CALL = 424  # numbers from here on are the same everywhere; libraries do without such calls
INSTRUCTION = struct.Struct("<HBBI")
# Terminal settings and size, bytes available, non-blocking, close-on-exec.
IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # duplicate, flags, locks; not the owner of data signals
AF_UNIX = 1
SECCOMP_SET_MODE_FILTER = 1


class Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def install(*, alone: bool) -> None:
    """Filter every later system call of this process and its children; `alone` forbids children."""
    code = build(alone=alone, pid=os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = Program(len(code) // INSTRUCTION.size, ctypes.addressof(buffer))
    kernel.syscall("seccomp", SECCOMP_SET_MODE_FILTER, 0, program)


def build(*, alone: bool, pid: int) -> bytes:
    lines = [
        _line(LOAD, AT_ARCH),
        _line(JUMP_EQUAL, kernel.AUDIT_ARCHES[os.uname().machine], 1, 0),
        _line(RETURN, KILL),
        _line(LOAD, AT_NUMBER),
        _line(JUMP_AT_LEAST, X32_BIT, 0, 1),
        _line(RETURN, KILL),
    ]
    for name in kernel.FILES | kernel.MEMORY_AND_SIGNALS | kernel.PROCESS_AND_TIME:
        lines += _rule(name, [_line(RETURN, ALLOW)])
    lines += _rules_by_argument(alone=alone, pid=pid)
    lines += [
        _line(JUMP_AT_LEAST, FIRST_NEW_CALL, 0, 1),
        _line(RETURN, FAIL | errno.ENOSYS),
        _line(RETURN, FAIL | errno.EPERM),
    ]
    return b"".join(lines)


def _rules_by_argument(*, alone: bool, pid: int) -> list[bytes]:
    lines = _rule("ioctl", _one_of(1, IOCTLS)) + _rule("prctl", _one_of(0, (kernel.PR_SET_NAME,)))
    lines += _rule("fcntl", _one_of(1, FCNTLS))
    lines += _rule("prlimit64", _one_of(0, (0,))) + _rule("socketpair", _one_of(0, (AF_UNIX,)))
    lines += _rule("sendto", _null(4))  # to the other end of a pair, not to an address
    if not alone:
        for name in ("clone", "fork", "vfork", "kill", "tgkill", "tkill"):
            new = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
            new |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
            lines += _rule(name, _without_bits(new) if name == "clone" else [_line(RETURN, ALLOW)])
        return lines
    lines += _rule("clone", _with_bits(kernel.CLONE_THREAD))
    for name in ("kill", "tgkill"):
        lines += _rule(name, _one_of(0, (pid,)))
    return lines


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return INSTRUCTION.pack(code, if_true, if_false, value)


def _rule(name: str, body: list[bytes]) -> list[bytes]:
    """Instructions for one system call; `body` returns on every path."""
    number = kernel.number(name)
    return [] if number is None else [_line(JUMP_EQUAL, number, 0, len(body)), *body]


def _one_of(argument: int, values: tuple[int, ...]) -> list[bytes]:
    lines = [_line(LOAD, AT_ARGUMENTS + 8 * argument)]
    lines += [_line(JUMP_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [*lines, _line(RETURN, FAIL | errno.EPERM), _line(RETURN, ALLOW)]


def _null(argument: int) -> list[bytes]:
    low, high = AT_ARGUMENTS + 8 * argument, AT_ARGUMENTS + 8 * argument + 4
    return [
        _line(LOAD, low),
        _line(JUMP_EQUAL, 0, 0, 2),
        _line(LOAD, high),
        _line(JUMP_EQUAL, 0, 1, 0),
        _line(RETURN, FAIL | errno.EPERM),
        _line(RETURN, ALLOW),
    ]


def _with_bits(bits: int) -> list[bytes]:
    load = _line(LOAD, AT_ARGUMENTS)
    return [load, _line(JUMP_ANY_BIT, bits, 1, 0), _line(RETURN, FAIL | errno.EPERM), _line(RETURN, ALLOW)]


def _without_bits(bits: int) -> list[bytes]:
    load = _line(LOAD, AT_ARGUMENTS)
    return [load, _line(JUMP_ANY_BIT, bits, 0, 1), _line(RETURN, FAIL | errno.EPERM), _line(RETURN, ALLOW)]
