# SPDX-License-Identifier: Apache-2.0
"""References to images and videos in rows (paths, URLs or bytes): open, identify, and name them in errors."""

import base64
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

Reference = str | bytes | dict[str, Any]
MediaData = Mapping[str, Sequence[Reference]] | None  # of a row, by `images`, `videos` and `audios`
DATA_URL = re.compile(r"data:[^,;]*(;[^,;]*)*?(?P<base64>;base64)?,", re.IGNORECASE)
BASE64 = re.compile(r"[A-Za-z0-9+/\s]++={0,2}\s*+")
MAX_NAME = 255  # characters of a file's name: a longer text without a dot is no path
URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(source: str | bytes) -> TypeGuard[str]:
    """Return whether a reference is a URL; `file://` counts as a path."""
    return isinstance(source, str) and URL.match(source) is not None


def inline_bytes(text: str, *, may_be_path: bool = True) -> bytes | None:
    """Return what a text holds as a data URL or in base64; None for a path or another URL.

    Raises:
        ValueError: It is a data URL in another encoding, or damaged.
    """
    if (url := DATA_URL.match(text)) is not None:
        if url["base64"] is None:
            raise ValueError("a data URL must be base64")
        return _decoded(text[url.end() :])
    if may_be_path and (len(text) <= MAX_NAME or BASE64.fullmatch(text) is None):
        return None
    return _decoded(text)


def _decoded(text: str) -> bytes:
    # it may have line breaks
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise ValueError(f"its base64 is damaged ({error}): {text[:40]!r}...") from error


@contextmanager
def reading(kind: str, ref: Reference, content: bytes | None = None) -> Iterator[None]:
    """Turn errors from a damaged or missing file into a ValueError that names the file.

    With `content`, the file must have this `content_id` after it was read.
    """
    try:
        yield
        if content is not None and _content_id(ref) != content:
            raise ValueError("it changed while it was being read")
    except ImportError:  # a fault of the installation
        raise
    except FileNotFoundError as error:
        raise ValueError(f"the {kind} {shown_name(ref)} cannot be read: there is no such file") from error
    except Exception as error:  # damaged files make Pillow and PyAV raise almost anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the {kind} {shown_name(ref)} cannot be read: {reason}") from error


def payload(ref: Reference) -> str | bytes:
    return (ref.get("bytes") or ref["path"]) if isinstance(ref, dict) else ref


def sound_of(video: Reference) -> Reference:
    """Return a reference to the sound of a video, or of the part of it that is read."""
    named = video if isinstance(video, dict) else {}
    part = {f"audio_{edge}": named[f"video_{edge}"] for edge in ("start", "end") if f"video_{edge}" in named}
    source = payload(video)
    return {"path" if isinstance(source, str) else "bytes": source, "is_sound": True, **part}


def shown_name(ref: Reference) -> str:
    """Return the name for errors: the original URL, the path, or the number of bytes."""
    source = (ref.get("url") if isinstance(ref, dict) else None) or payload(ref)
    return source if isinstance(source, str) else f"of {len(source)} bytes"


def read_file(path: str, max_bytes: int) -> bytes:
    """Read a whole file; a ValueError refuses a device, a pipe and more than `max_bytes`."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    with open(path, "rb") as file:
        content = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
    if status.st_size > max_bytes or len(content) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes >> 20} MiB")
    return content


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


def media_key(media: MediaData) -> tuple:
    """Return what is equal for rows that refer to the same media."""
    return tuple(
        (kind, tuple(tuple(sorted(ref.items())) if isinstance(ref, dict) else ref for ref in refs))
        for kind, refs in sorted((media or {}).items())
        if refs
    )
