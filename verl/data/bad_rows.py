# SPDX-License-Identifier: Apache-2.0
"""Rows that cannot be used, and the file that lists them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from verl.utils.rank_logger import get_logger

BAD_ROW_REMEDY = "\nrepair the data, or set `data.on_bad_row=skip` to leave such rows out"
REPORT_NAME = "bad_rows.jsonl"

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
                file, _, number = row.where.rpartition(", row ")
                if (file, int(number)) not in self._listed:
                    self._listed.add((file, int(number)))
                    lines.append(json.dumps({"file": file, "row": int(number), "reason": row.reason}))
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
