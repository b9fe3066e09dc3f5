# SPDX-License-Identifier: Apache-2.0
"""Metrics and rollouts of runs as parts of files in the formats of `FORMATS`.

In CSV, lists and mappings are JSON, and a text that a spreadsheet would take for a formula begins with an
apostrophe.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from verl.viewer.queries import GROUP
from verl.viewer.rollout_index import EXPORTED, plain
from verl.viewer.runs import RunFolder

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of texts that a spreadsheet would compute
FORMATS = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}
COLUMNS = ["run", "kind", *EXPORTED]
Row = Mapping[str, Any]
PART_ROWS = 200  # to send at once


def exported_metrics(runs: Sequence[RunFolder], name: str) -> Iterator[str]:
    """Yield `run`, `step` and the metrics of each step; in CSV one that a step lacks is empty."""
    metrics = sorted({metric for run in runs for metric in run.metrics()["metrics"]})
    return _parts(["run", "step", *metrics], _metrics_rows(runs), name)


def _metrics_rows(runs: Sequence[RunFolder]) -> Iterator[Row]:
    for run in runs:
        log = run.metrics()
        for index, step in enumerate(log["step"]):
            values = {name: column[index] for name, column in log["metrics"].items()}
            present = {name: value for name, value in values.items() if value is not None}
            yield {"run": plain(run.name), "step": step} | present


def exported(runs: Sequence[RunFolder], table: pa.Table, name: str) -> Iterator[str]:
    """Yield the rows by run, kind and step: all columns but those of tokens, with the run's name."""
    return _parts(COLUMNS, _rows(runs, table), name)


def _rows(runs: Sequence[RunFolder], table: pa.Table) -> Iterator[Row]:
    chosen: dict[tuple[int, str, int], set[tuple[str, int]]] = {}
    for row in table.select([*GROUP, "sample"]).to_pylist():
        chosen.setdefault((row["run"], row["kind"], row["step"]), set()).add((row["group"], row["sample"]))
    for run, kind, step in sorted(chosen):
        for row in runs[run].rollouts.rows_of(kind, step, chosen[run, kind, step]):
            yield {"run": plain(runs[run].name)} | row


def _parts(columns: Sequence[str], rows: Iterable[Row], name: str) -> Iterator[str]:
    part = io.StringIO()
    writer = csv.writer(part)
    if name == "csv":
        writer.writerow(map(_cell, columns))
    for number, row in enumerate(rows, start=1):
        if name == "csv":
            writer.writerow([_cell(row.get(column)) for column in columns])
        else:
            part.write(json.dumps(row, ensure_ascii=False) + "\n")
        if number % PART_ROWS == 0:
            yield part.getvalue()
            part.seek(0)
            part.truncate()
    yield part.getvalue()


def _cell(value: Any) -> Any:
    """Return a value that a spreadsheet shows as it is: a text in a log may be anyone's."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
