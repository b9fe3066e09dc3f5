# SPDX-License-Identifier: Apache-2.0
"""Standard output and error of a long run, which may lose their reader (`| head`) or their terminal."""

import errno
import io
import os
import sys
from typing import Any, TextIO

NUMBERS = range(3)  # of stdin, stdout and stderr
GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # a pipe without reader, a terminal that hung up, a closed file


def outlive_readers() -> None:
    """Let this process, and processes that it starts later, continue when their output has no reader."""
    for number in NUMBERS:
        if not _is_open(number):  # else a file that is opened later would get the number, and what is printed
            _discard(number)
    sys.stdout = _lasting(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _lasting(sys.stderr, sys.__stderr__, 2)


class _LastingFile(io.FileIO):
    """A file descriptor to which writing always succeeds; what cannot be written is lost."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in GONE:
                _discard(self.fileno())
            return len(data)


def _lasting(stream: TextIO | None, original: TextIO | None, number: int) -> TextIO:
    if stream is not None and (stream is not original or not isinstance(stream, io.TextIOWrapper)):
        return stream  # a caller's own, or done before
    raw = _LastingFile(number, "wb", closefd=False)
    if stream is None:  # it was closed when Python started
        return io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    stream.flush()
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # by PYTHONUNBUFFERED
    file: Any = raw if is_unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        file, stream.encoding, stream.errors,
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _discard(number: int) -> None:
    """Let a descriptor lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)
