# SPDX-License-Identifier: Apache-2.0
"""Rows that cannot be used: how they are named, and the file that lists them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from verl.utils.rank_logger import get_logger

BAD_ROW_REMEDY = "\nrepair the data, or set `data.on_bad_row=skip` to leave such rows out"
REPORT_NAME = "bad_rows.jsonl"

logger = get_logger(__name__)


class BadRowError(ValueError):
    """A row of the data cannot be used; the message says where it is and why."""


class BadRow(NamedTuple):
    """A row that is left out: where it stands and why it cannot be used."""

    index: int
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class BadRowReport:
    """The bad rows of a run and of those that resume it, one line for each, for whoever repairs the data.

    Example::

        {"file": "train.jsonl", "row": 17, "reason": "the image 17.png cannot be read: ..."}

    Args:
        path: Of the file; it and its folder are made when there is something to list.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listed: set[tuple[str, int]] | None = None  # file and row; None before the file was read

    def add(self, rows: Iterable[BadRow]) -> None:
        """Append the rows that are not listed yet. A file that cannot be written is a warning."""
        lines = []
        try:
            if self._listed is None:
                self._listed = self._read()
            for row in rows:
                file, _, number = row.where.rpartition(", row ")
                if (file, int(number)) not in self._listed:
                    self._listed.add((file, int(number)))
                    lines.append(json.dumps({"file": file, "row": int(number), "reason": row.reason}))
            if lines:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as report:
                    report.write("".join(f"{line}\n" for line in lines))
        except (OSError, ValueError, KeyError, TypeError) as error:  # no room, or lines of somebody else's
            self._listed = None
            logger.warning("bad rows are not listed: path=%s rows=%d error=%s", self.path, len(lines), error)

    def _read(self) -> set[tuple[str, int]]:
        """What earlier runs listed; the line that a run was writing when it was killed is removed."""
        if not self.path.exists():
            return set()
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole)
        entries = [json.loads(line) for line in whole.splitlines()]
        return {(entry["file"], entry["row"]) for entry in entries}
