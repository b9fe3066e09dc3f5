# SPDX-License-Identifier: Apache-2.0
"""Rows of a large file of JSON lines, which stay on disk and are parsed one at a time.

The first time that a file is opened, every line is checked, and the offsets of the rows are stored in a cache
(`XDG_CACHE_HOME`, or `~/.cache`). Later runs map both into memory: neither grows with the number of rows. The
cache is keyed by the file's path, size and time of change.
"""

import hashlib
import json
import mmap
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.plain_files import TEXT, Row, Source, check_listed, parse_line, read_jsonl
from verl.utils.rank_logger import get_logger

MAPPED_BYTES = 64 << 20  # of a file; smaller ones are read whole, in a second

logger = get_logger(__name__)


class MappedLines(Sequence[Row]):
    """Rows of a file, parsed when they are asked for.

    Args:
        text: The whole file, mapped into memory.
        starts: Offsets of the rows and of the end of the last one, (rows + 1,).
    """

    def __init__(self, text: mmap.mmap, starts: np.ndarray) -> None:
        self.text, self.starts = text, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, "rows are sliced without steps"
            return MappedLines(self.text, self.starts[start : max(start, stop) + 1])
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, stop = self.starts[index % len(self) :][:2].tolist()
        return json.loads(self.text[start:stop].decode(TEXT))

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def read_lines(path: Path) -> Source:
    """Open a file of JSON lines, in memory or mapped."""
    if path.stat().st_size < MAPPED_BYTES:
        return read_jsonl(path)
    index, columns = stored_index(path) or _store(path, *build_index(path))
    with path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    text.madvise(mmap.MADV_RANDOM)  # else a row reads its neighbors, too
    return Source(str(path), MappedLines(text, index), columns)


def build_index(path: Path) -> tuple[np.ndarray, list[str]]:
    """Check every line; return the offsets of rows and end, and the columns of all rows."""
    starts, columns, offset = array("Q"), set(), 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            row = parse_line(number, line.decode(TEXT))
            if row is not None:
                check_listed([row])
                columns.update(row)
                starts.append(offset)
            offset += len(line)
    starts.append(offset)
    return np.frombuffer(starts, dtype=np.uint64), sorted(columns)


def stored_index(path: Path) -> tuple[np.ndarray, list[str]] | None:
    """Return the index of an earlier run; None if there is none for the file as it is now."""
    offsets, columns = _places(path)
    if not columns.is_file():
        return None
    return np.load(offsets, mmap_mode="r"), json.loads(columns.read_text())


def _store(path: Path, starts: np.ndarray, columns: list[str]) -> tuple[np.ndarray, list[str]]:
    places = _places(path)
    try:
        places[0].parent.mkdir(parents=True, exist_ok=True)
        _replace(places[0], lambda file: np.save(file, starts))
        _replace(
            places[1], lambda file: file.write(json.dumps(columns).encode())
        )  # last: then both are there
    except OSError as error:
        logger.warning("the index of rows could not be stored: path=%s error=%s", places[0], error)
        return starts, columns
    return np.load(places[0], mmap_mode="r"), columns


def _replace(place: Path, write: Any) -> None:
    # other processes may open the same file at the same time
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        write(file)
    os.replace(file.name, place)


def _places(path: Path) -> tuple[Path, Path]:
    """Return the files of offsets and of columns."""
    state = path.stat()
    key = f"{path.resolve()} {state.st_size} {state.st_mtime_ns}"
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl" / "rows"
    return folder / f"{name}.npy", folder / f"{name}.json"
