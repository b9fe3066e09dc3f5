# SPDX-License-Identifier: Apache-2.0
"""Rollouts of one run in memory: a table of the short columns; the rest is read on demand."""

import math
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from verl.viewer.rollout_store import SCHEMA, TABLE_COLUMNS, step_files

TABLE_SCHEMA = pa.schema([SCHEMA.field(name) for name in TABLE_COLUMNS])
UNREADABLE = (pa.ArrowException, OSError, ValueError)  # raised for damaged files; the last for texts
Signature = tuple[int, int]  # modification time in ns, bytes


class RolloutIndex:
    """Index of a run's kept rollouts; `problems` has the unreadable files, which are skipped.

    Example::

        index = RolloutIndex(Path("checkpoints/math/first"))
        index.refresh().num_rows
        index.group(step=12, group="step12-0-0")
    """

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.problems: dict[str, str] = {}
        self._table = TABLE_SCHEMA.empty_table()
        self._known: dict[int, Signature] = {}
        self._lock, self._search_lock = threading.Lock(), threading.Lock()
        self._searched = ("", self._table, self._table)  # last text, searched table, result

    def refresh(self) -> pa.Table:
        """Read new and changed files; return the columns `TABLE_COLUMNS` of all rollouts, unsorted."""
        with self._lock:
            files = step_files(self.run_folder)
            found = {step: signature for step, path in files.items() if (signature := _signature(path))}
            changed = [step for step, signature in found.items() if self._known.get(step) != signature]
            stale = [step for step in self._known if found.get(step) != self._known[step]]
            if stale:
                self._table = self._table.filter(~pc.field("step").isin(stale))
            if changed:
                for step in changed:
                    self.problems.pop(files[step].name, None)
                read = self._read([files[step] for step in changed])
                self._table = pa.concat_tables([self._table, read]).combine_chunks()
            self._known = found
            return self._table

    def search(self, text: str) -> pa.Table:
        """Return the rows whose prompt, response or ground truth contains a text, ignoring case."""
        table = self.refresh()
        with self._search_lock:  # the page requests rows and histograms together: search once
            if self._searched[0] != text or self._searched[1] is not table:
                self._searched = (text, table, self._search(text))
            return self._searched[2]

    def group(self, step: int, group: str) -> list[dict[str, Any]]:
        """Return all columns of the responses to a prompt as JSON values."""
        path = step_files(self.run_folder).get(step)
        if path is None:
            raise KeyError(f"{self.run_folder} keeps no rollouts of step {step}")
        try:
            rows = pq.read_table(path, schema=SCHEMA, filters=ds.field("group") == group).to_pylist()
        except UNREADABLE as error:
            raise KeyError(f"{path} cannot be read: {error}") from error
        if not rows:
            raise KeyError(f"step {step} has no group {group!r}")
        return [plain(row | {"reward_values": dict(row["reward_values"] or [])}) for row in rows]

    def _search(self, text: str) -> pa.Table:
        contains = pc.match_substring  # pyright: ignore[reportAttributeAccessIssue] - made at import
        in_prompt, in_response, in_truth = (
            contains(ds.field(name), text, ignore_case=True)
            for name in ("prompt", "response", "ground_truth")
        )
        paths = [path for path in step_files(self.run_folder).values() if path.name not in self.problems]
        return self._read(paths, in_prompt | in_response | in_truth)

    def _read(self, paths: list[Path], rows: ds.Expression | None = None) -> pa.Table:
        try:
            return _columns_of(paths, rows)
        except UNREADABLE as error:
            if len(paths) > 1:  # one of them is damaged: find it
                return pa.concat_tables([self._read([path], rows) for path in paths])
            self.problems[paths[0].name] = str(error)
            return TABLE_SCHEMA.empty_table()


def plain(value: Any) -> Any:
    """Convert to JSON values: numbers that are not finite become None, halves of characters `?`."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return value


def _columns_of(paths: list[Path], rows: ds.Expression | None = None) -> pa.Table:
    data = ds.dataset([str(path) for path in paths], schema=SCHEMA, format="parquet")
    table = data.to_table(columns=TABLE_COLUMNS, filter=rows)
    table.validate(full=True)  # texts may be no UTF-8
    return table


def _signature(path: Path) -> Signature | None:
    try:
        status = path.stat()
    except OSError:  # removed since it was listed
        return None
    return status.st_mtime_ns, status.st_size
