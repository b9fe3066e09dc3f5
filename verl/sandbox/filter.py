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

from verl.sandbox import kernel

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


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return INSTRUCTION.pack(code, if_true, if_false, value)


ALLOWED = (_line(RETURN, ALLOW),)
DENY_OR_ALLOW = (_line(RETURN, FAIL | errno.EPERM), *ALLOWED)


def install(*, alone: bool) -> None:
    """Filter every later system call of this process and its children; `alone` forbids children."""
    code = build(alone=alone, pid=os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    # `struct sock_fprog`
    program = struct.pack("HP", len(code) // INSTRUCTION.size, ctypes.addressof(buffer))
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
    rules = dict.fromkeys(kernel.FREE, ALLOWED) | _rules_by_argument(alone=alone, pid=pid)
    for name, body in rules.items():
        number = kernel.number(name)
        if number is not None:
            lines += [_line(JUMP_EQUAL, number, 0, len(body)), *body]
    lines += [_line(JUMP_AT_LEAST, FIRST_NEW_CALL, 0, 1), _line(RETURN, FAIL | errno.ENOSYS)]
    return b"".join([*lines, _line(RETURN, FAIL | errno.EPERM)])


def _rules_by_argument(*, alone: bool, pid: int) -> dict[str, tuple[bytes, ...]]:
    """Return for each system call the instructions that decide on its arguments."""
    rules = {
        "ioctl": _one_of(1, IOCTLS),
        "prctl": _one_of(0, (kernel.PR_SET_NAME,)),
        "fcntl": _one_of(1, FCNTLS),
        "prlimit64": _one_of(0, (0,)),
        "socketpair": _one_of(0, (AF_UNIX,)),
        "sendto": _null(4),  # to the other end of a pair, not to an address
    }
    if alone:
        own_process = _one_of(0, (pid,))
        return rules | {"clone": _bits(kernel.CLONE_THREAD, 1), "kill": own_process, "tgkill": own_process}
    rules |= dict.fromkeys(("fork", "vfork", "kill", "tgkill", "tkill"), ALLOWED)
    return rules | {"clone": _bits(kernel.NEW_NAMESPACES, 0)}


# Each of the following allows a call or denies it; the last two instructions say so.


def _one_of(argument: int, values: tuple[int, ...]) -> tuple[bytes, ...]:
    lines = [_line(LOAD, AT_ARGUMENTS + 8 * argument)]
    lines += [_line(JUMP_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return *lines, *DENY_OR_ALLOW


def _null(argument: int) -> tuple[bytes, ...]:
    low, high = (_line(LOAD, AT_ARGUMENTS + 8 * argument + half) for half in (0, 4))
    return low, _line(JUMP_EQUAL, 0, 0, 2), high, _line(JUMP_EQUAL, 0, 1, 0), *DENY_OR_ALLOW


def _bits(bits: int, wanted: int) -> tuple[bytes, ...]:
    """Allow a call if any of `bits` is set in its first argument; with `wanted` 0 if none is."""
    return _line(LOAD, AT_ARGUMENTS), _line(JUMP_ANY_BIT, bits, wanted, 1 - wanted), *DENY_OR_ALLOW
