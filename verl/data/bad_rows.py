# SPDX-License-Identifier: Apache-2.0
"""Unusable rows, and the file with their list."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from verl.utils.rank_logger import get_logger

BAD_ROW_REMEDY = "\nrepair the data, or set `data.on_bad_row=skip` to leave such rows out"
REPORT_NAME = "bad_rows.jsonl"
MAX_LISTED = 10  # lines of an error
MAX_NUMBERS = 3  # rows that a line names
DETAILS = re.compile(r"(?:[\w.-]+:/)?[\w.~-]*/\S*|\d+")  # paths, URLs and numbers

logger = get_logger(__name__)


class BadRowError(ValueError):
    """A data row cannot be used; the message gives the reason."""


class BadRow(NamedTuple):
    """A row that is left out, its location and the reason."""

    index: int
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

    @property
    def place(self) -> tuple[str, int]:
        file, _, number = self.where.rpartition(", row ")
        return file, int(number)


def describe_rows(rows: Iterable[BadRow], limit: int = MAX_LISTED) -> list[str]:
    """Give one line for all rows of a file that cannot be used for the same reason, at most `limit` lines.

    Reasons are the same if they differ only in numbers and in the names of files.

    Example::

        train.jsonl, rows 3, 7, 9 and 7 more; row 3: the image a.png cannot be read: there is no such file
    """
    groups: dict[tuple[str, str], list[BadRow]] = {}
    for row in rows:
        groups.setdefault((row.place[0], DETAILS.sub("*", row.reason)), []).append(row)
    lines = [_describe_group(group) for group in groups.values()]
    rest = [row for group in list(groups.values())[limit:] for row in group]
    return lines[:limit] + ([f"... and {len(rest)} rows more"] if rest else [])


def _describe_group(rows: Sequence[BadRow]) -> str:
    if len(rows) == 1:
        return str(rows[0])
    file, first = rows[0].place
    numbers = [str(row.place[1]) for row in rows]
    named, more = numbers[:MAX_NUMBERS], len(numbers) - MAX_NUMBERS
    shown = f"{', '.join(named)} and {more} more" if more > 0 else f"{', '.join(named[:-1])} and {named[-1]}"
    is_same = all(row.reason == rows[0].reason for row in rows)
    return f"{file}, rows {shown}{'' if is_same else f'; row {first}'}: {rows[0].reason}"


def bad_rows_text(option: str, rows: Sequence[BadRow], looked: int | None = None) -> str:
    """Say which rows cannot be used, of the number that were looked at if there are others."""
    among = "" if looked is None else f" of the first {looked}"
    return "\n  ".join([f"`{option}`: {len(rows)}{among} rows cannot be used:", *describe_rows(rows)])


class BadRowReport:
    """The file of bad rows: one line per row, over a run and all runs that resume it.

    Example::

        {"file": "train.jsonl", "row": 17, "reason": "the image 17.png cannot be read: ..."}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listed: set[tuple[str, int]] | None = None  # (file, row); None until the file is read

    def add(self, rows: Iterable[BadRow]) -> None:
        """Append the rows that are not listed yet. An error only logs a warning."""
        lines = []
        try:
            self._listed = self._read() if self._listed is None else self._listed
            for row in rows:
                file, number = row.place
                if (file, number) not in self._listed:
                    self._listed.add((file, number))
                    lines.append(json.dumps({"file": file, "row": number, "reason": row.reason}))
            if lines:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as report:
                    report.write("".join(f"{line}\n" for line in lines))
        except (OSError, ValueError, KeyError, TypeError) as error:  # full disk, or foreign lines
            self._listed = None
            logger.warning(
                "bad rows could not be listed: path=%s rows=%d error=%s", self.path, len(lines), error
            )

    def _read(self) -> set[tuple[str, int]]:
        """Read the rows of earlier runs; an incomplete last line of a killed run is removed."""
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole)
        entries = [json.loads(line) for line in whole.splitlines()]
        return {(entry["file"], entry["row"]) for entry in entries}
