# SPDX-License-Identifier: Apache-2.0
"""References to images and videos in rows (paths, URLs or bytes): open, identify, and name them in errors."""

import io
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import av.error
from PIL import Image

Reference = str | bytes | dict[str, Any]
URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# raised by Pillow and PyAV for files that are not images or videos
UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
    av.error.FFmpegError,
)


def is_url(source: str | bytes) -> TypeGuard[str]:
    """Return whether a reference is a URL; `file://` counts as a path."""
    return isinstance(source, str) and URL.match(source) is not None


@contextmanager
def reading(kind: str, ref: Reference) -> Iterator[None]:
    """Turn errors from a damaged or missing file into a ValueError that names the file."""
    try:
        yield
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the {kind} {shown_name(ref)} cannot be read: {reason}") from error


@contextmanager
def reading_unchanged(kind: str, ref: Reference, content: bytes) -> Iterator[None]:
    """Like `reading`, and check that the file still has the `content_id` it had before."""
    with reading(kind, ref):
        yield
        if _content_id(ref) != content:
            raise ValueError("it changed while it was being read")


def payload(ref: Reference) -> str | bytes:
    """Return the path, URL or bytes that a reference holds."""
    if isinstance(ref, dict):
        return ref.get("bytes") or ref["path"]
    return ref


def shown_name(ref: Reference) -> str:
    """Return the name for errors: the original URL, the path, or the number of bytes."""
    source = (ref.get("url") if isinstance(ref, dict) else None) or payload(ref)
    return source if isinstance(source, str) else f"of {len(source)} bytes"


def openable(ref: Reference) -> str | io.BytesIO:
    source = payload(ref)
    return io.BytesIO(source) if isinstance(source, bytes) else source


def content_id(kind: str, ref: Reference) -> bytes:
    """Identify the content: the bytes themselves, or path, size and modification time of a file."""
    with reading(kind, ref):
        return _content_id(ref)


def _content_id(ref: Reference) -> bytes:
    source = payload(ref)
    if isinstance(source, bytes):
        return source
    status = os.stat(source)
    return f"{os.path.abspath(source)} {status.st_size} {status.st_mtime_ns}".encode()
