# SPDX-License-Identifier: Apache-2.0
"""Rows of a large file of JSON lines, which stay on disk and are parsed when they are asked for.

Opening such a file counts the lines that start in each of its blocks, which takes as long as reading it, and
parses a sample of the rows. Every other row is checked when it is read. In memory are two numbers for each
block: a thousandth of the file.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.data.plain_files import FIRST_ROWS, TEXT, Row, Source, parse_line, read_jsonl, unreadable

MAPPED_BYTES = 64 << 20  # of a file; smaller ones are read whole, in a second
BLOCK = 16 << 10  # bytes, which are searched to find a row
CHUNK = 1 << 20  # bytes whose lines are counted at once
SPACED_ROWS = 512  # over the whole file, that are parsed when it is opened
END, USUAL = ord("\n"), ord("{")  # the last byte of a line, and the first one of a row


class Counts(NamedTuple):
    """Numbers before each block of a file and at its end, (blocks + 1,)."""

    lines: np.ndarray
    rows: np.ndarray  # lines that are not blank


class MappedLines(Sequence[Row]):
    """Rows of a file of JSON lines, which is mapped into memory.

    A line belongs to the block of the line end before it.

    Args:
        rows: Which rows of the file these are; None is all.
    """

    def __init__(self, path: Path, counts: Counts | None = None, rows: range | None = None) -> None:
        self.path = path
        with path.open("rb") as file:
            self.text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self.text, dtype=np.uint8)
        if counts is None:
            self.text.madvise(mmap.MADV_SEQUENTIAL)
            counts = self._count()
        self.counts = counts
        self.rows = range(int(counts.rows[-1])) if rows is None else rows
        self.text.madvise(mmap.MADV_RANDOM)  # else a row reads its neighbors, too

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedLines, (self.path.absolute(), self.counts, self.rows)  # another process maps it itself

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return MappedLines(self.path, self.counts, self.rows[index])
        number = self.rows[index]
        try:
            return self.row(number)
        except (ValueError, RecursionError) as error:
            raise unreadable(self.path, error) from error

    def row(self, number: int) -> Row:
        """Parse a row of the file; a ValueError names its line."""
        if self.text.size() < len(self.text):  # reading beyond its end would kill the process
            raise ValueError("it was cut while it was open: replace a file by renaming another one")
        start, line = self._find(number)
        try:
            text = self._line(start)
        except UnicodeDecodeError as error:
            raise ValueError(f"line {line} is not UTF-8 text: {error}") from error
        return parse_line(line, text)

    def _find(self, number: int) -> tuple[int, int]:
        """Return the offset of a row and the number of its line."""
        lines, rows = self.counts
        block = int(np.searchsorted(rows, number, side="right")) - 1
        starts, place = self._starts(block), number - int(rows[block])
        if rows[block + 1] - rows[block] < len(starts):
            place = [place for place, start in enumerate(starts) if not self._is_blank(int(start))][place]
        return int(starts[place]), int(lines[block]) + place + 1

    def _starts(self, block: int) -> np.ndarray:
        offset = block * BLOCK
        starts = np.flatnonzero(self.bytes[offset : offset + BLOCK] == END) + (offset + 1)
        starts = starts[starts < len(self.bytes)]
        return starts if block else np.concatenate([[0], starts])

    def _count(self) -> Counts:
        size = len(self.bytes)
        lines, blanks = np.zeros((2, -(-size // BLOCK) + 1), dtype=np.int64)
        lines[1], blanks[1] = 1, self._is_blank(0)  # no line end is before the first line
        for offset in range(0, size, CHUNK):
            # The last byte starts no line.
            ends = offset + np.flatnonzero(self.bytes[offset : min(offset + CHUNK, size - 1)] == END)
            firsts = self.bytes[ends + 1]
            np.add.at(lines, ends // BLOCK + 1, 1)
            np.add.at(blanks, ends[firsts == END] // BLOCK + 1, 1)
            for end in ends[(firsts != END) & (firsts != USUAL)].tolist():
                blanks[end // BLOCK + 1] += self._is_blank(end + 1)
        return Counts(lines.cumsum(), (lines - blanks).cumsum())

    def _is_blank(self, start: int) -> bool:
        return not self._line(start, errors="replace").strip()

    def _line(self, start: int, errors: str = "strict") -> str:
        stop = self.text.find(b"\n", start)
        line = self.text[start:] if stop < 0 else self.text[start:stop]
        return line.decode("utf-8" if start else TEXT, errors)


def read_lines(path: Path) -> Source:
    """Open a file of JSON lines, in memory or mapped; the columns of a mapped one are those of a sample."""
    if path.stat().st_size < MAPPED_BYTES:
        return read_jsonl(path)
    lines = MappedLines(path)
    columns = {column for number in sampled_places(len(lines)) for column in lines.row(number)}
    return Source(str(path), lines, sorted(columns))


def sampled_places(num_rows: int) -> list[int]:
    """Return the places of the first rows, and of others in equal distances up to the last one."""
    spaced = {place * (num_rows - 1) // (SPACED_ROWS - 1) for place in range(SPACED_ROWS)}
    return sorted(place for place in spaced | set(range(FIRST_ROWS)) if 0 <= place < num_rows)
