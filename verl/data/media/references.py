# SPDX-License-Identifier: Apache-2.0
"""References to images and videos in rows: paths, URLs or bytes; opened, told apart, and named in errors."""

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av.error
from PIL import Image

Reference = str | bytes | dict[str, Any]
# what Pillow and PyAV raise on a file that is no image or video
UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
    av.error.FFmpegError,
)


@contextmanager
def reading(kind: str, ref: Reference) -> Iterator[None]:
    """Turn what a damaged or missing file raises into a ValueError that names the file."""
    try:
        yield
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the {kind} {shown_name(ref)} cannot be read: {reason}") from error


@contextmanager
def reading_unchanged(kind: str, ref: Reference, content: bytes) -> Iterator[None]:
    """Like `reading`, and sure that what was read is what `content_id` said before."""
    with reading(kind, ref):
        yield
        if _content_id(ref) != content:
            raise ValueError("it changed while it was being read")


def payload(ref: Reference) -> str | bytes:
    """The path, the URL or the bytes that a reference holds."""
    if isinstance(ref, dict):
        return ref.get("bytes") or ref["path"]
    return ref


def shown_name(ref: Reference) -> str:
    """What an error calls it: the URL it was fetched from, its path, or how many bytes it has."""
    source = (ref.get("url") if isinstance(ref, dict) else None) or payload(ref)
    return source if isinstance(source, str) else f"of {len(source)} bytes"


def openable(ref: Reference) -> str | io.BytesIO:
    """What Pillow and PyAV open."""
    source = payload(ref)
    return io.BytesIO(source) if isinstance(source, bytes) else source


def content_id(kind: str, ref: Reference) -> bytes:
    """What tells the content from any other: the bytes, or path, size and time of change of a file.

    Raises:
        ValueError: The file cannot be looked at; the message names it.
    """
    with reading(kind, ref):
        return _content_id(ref)


def _content_id(ref: Reference) -> bytes:
    source = payload(ref)
    if isinstance(source, bytes):
        return source
    status = os.stat(source)
    return f"{os.path.abspath(source)} {status.st_size} {status.st_mtime_ns}".encode()
