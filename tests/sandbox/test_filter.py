# SPDX-License-Identifier: Apache-2.0
"""The filter of system calls, read by a second implementation of the kernel's packet filter."""

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from verl.sandbox import filter, kernel

HEADERS = (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h"))
PID = 77
NAMES = {kernel.number(name): name for name in kernel.NUMBERS}
EPERM, ENOSYS = filter.FAIL | errno.EPERM, filter.FAIL | errno.ENOSYS


def decide(number, *arguments, alone=True, arch=None):
    """What the filter says to a system call: the instructions one by one, as the kernel follows them."""
    arch = kernel.AUDIT_ARCHES[os.uname().machine] if arch is None else arch
    arguments = [value % (1 << 64) for value in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments)
    code = list(filter.INSTRUCTION.iter_unpack(filter.build(alone=alone, pid=PID)))
    at, value = 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        if operation == filter.RETURN:
            return operand
        if operation == filter.LOAD:
            (value,) = struct.unpack_from("<I", data, operand)
            continue
        holds = {
            filter.JUMP_EQUAL: value == operand,
            filter.JUMP_AT_LEAST: value >= operand,
            filter.JUMP_ANY_BIT: bool(value & operand),
        }[operation]
        at += if_true if holds else if_false


def call(name, *arguments, alone=True):
    return decide(kernel.number(name), *arguments, alone=alone)


@pytest.mark.skipif(not all(header.exists() for header in HEADERS), reason="no headers of the kernel")
def test_the_numbers_are_those_of_the_headers():
    columns = []
    for header in HEADERS:
        found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
        columns.append({name: int(number) for name, number in found})
    columns[1]["newfstatat"] = columns[1]["fstatat"]  # its name where it was born with 64 bits

    for name, numbers in kernel.NUMBERS.items():
        assert (columns[0].get(name), columns[1].get(name)) == numbers, name


@pytest.mark.parametrize("alone", [True, False])
def test_every_call_that_is_not_listed_fails(alone):
    for number in range(600):
        allowed = decide(number, alone=alone) == filter.ALLOW
        if NAMES.get(number) in kernel.FREE:
            assert allowed, NAMES[number]
        elif NAMES.get(number) not in kernel.SPECIAL:
            assert decide(number, alone=alone) == (ENOSYS if number >= 424 else EPERM), number


def test_some_calls_are_allowed_with_certain_arguments_only():
    assert call("kill", PID, 9) == filter.ALLOW
    assert call("kill", PID + 1, 9) == call("kill", -1, 9) == call("tgkill", 1, 1, 9) == EPERM
    assert call("clone", kernel.CLONE_THREAD | 0x100) == filter.ALLOW
    assert call("clone", 17) == call("clone", kernel.CLONE_NEWUSER) == EPERM
    assert call("prctl", kernel.PR_SET_NAME) == filter.ALLOW
    assert call("prctl", kernel.PR_SET_PDEATHSIG) == call("prctl", 22, 2) == EPERM
    assert call("prlimit64", 0, 7) == filter.ALLOW
    assert call("prlimit64", 1234, 7) == EPERM
    assert call("socketpair", 1) == filter.ALLOW
    assert call("socketpair", 2) == EPERM
    assert call("sendto", 3, 4, 5, 0, 0) == filter.ALLOW
    assert call("sendto", 3, 4, 5, 0, 1 << 32) == call("sendto", 3, 4, 5, 0, 8) == EPERM
    assert call("ioctl", 0, 0x5401) == filter.ALLOW
    assert call("ioctl", 0, 0x5412) == EPERM  # typing into the terminal
    assert call("fcntl", 0, 2) == filter.ALLOW
    assert call("fcntl", 0, 8) == call("fcntl", 0, 10) == call("fcntl", 0, 1031) == EPERM


def test_with_several_processes_a_fork_is_allowed_and_a_namespace_is_not():
    assert call("clone", 17, alone=False) == call("kill", 5, 9, alone=False) == filter.ALLOW
    for flag in (kernel.CLONE_NEWUSER, kernel.CLONE_NEWNS, kernel.CLONE_NEWNET, kernel.CLONE_NEWCGROUP):
        assert call("clone", 17 | flag, alone=False) == EPERM


def test_calls_of_another_architecture_kill():
    assert decide(0, arch=0x40000003) == filter.KILL  # 32 bits of x86
    assert decide(filter.X32_BIT | 1) == filter.KILL
