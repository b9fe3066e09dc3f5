# SPDX-License-Identifier: Apache-2.0
"""Metrics and rollouts of runs as CSV and JSONL."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from verl.viewer.queries import GROUP
from verl.viewer.rollout_index import EXPORTED, plain
from verl.viewer.runs import RunFolder

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of texts that a spreadsheet would compute
FORMATS = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}
COLUMNS = ["run", "kind", *EXPORTED]
PART_ROWS = 200  # to send at once


def metrics_csv(runs: Sequence[RunFolder]) -> str:
    """Return columns `run`, `step` and all metrics; a metric that a step lacks is empty."""
    logs = [run.metrics() for run in runs]
    names = sorted({name for log in logs for name in log["metrics"]})
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["run", "step", *(_cell(plain(name)) for name in names)])
    for run, log in zip(runs, logs, strict=True):
        columns = [log["metrics"].get(name) for name in names]
        for index, step in enumerate(log["step"]):
            writer.writerow([_cell(plain(run.name)), step, *(column and column[index] for column in columns)])
    return text.getvalue()


def metrics_jsonl(runs: Sequence[RunFolder]) -> str:
    """Return `{"run": "first", "step": 3, "reward/overall": 0.5}` for each step, with the metrics it has."""
    lines = []
    for run in runs:
        log = run.metrics()
        for index, step in enumerate(log["step"]):
            values = {name: column[index] for name, column in log["metrics"].items()}
            present = {name: value for name, value in values.items() if value is not None}
            lines.append(json.dumps({"run": plain(run.name), "step": step} | present) + "\n")
    return "".join(lines)


def _cell(value: Any) -> Any:
    """Return a value that a spreadsheet shows as it is: a text in a log may be anyone's."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def exported(runs: Sequence[RunFolder], table: pa.Table, name: str) -> Iterator[str]:
    """Yield parts of a file with the rows in a format of `FORMATS`, in the order of run, kind and step.

    All columns but those of tokens, with the run's name. In CSV, lists and mappings are JSON, and a text
    that a spreadsheet would take for a formula begins with an apostrophe.
    """
    part = [_csv_line(COLUMNS)] if name == "csv" else []
    for row in _rows(runs, table):
        if name == "jsonl":
            values = {column: row[column] for column in COLUMNS}
            part.append(json.dumps(values, ensure_ascii=False) + "\n")
        else:
            part.append(_csv_line([_cell(row[column]) for column in COLUMNS]))
        if len(part) >= PART_ROWS:
            yield "".join(part)
            part = []
    yield "".join(part)


def _rows(runs: Sequence[RunFolder], table: pa.Table) -> Iterator[Mapping[str, Any]]:
    chosen: dict[tuple[int, str, int], set[tuple[str, int]]] = {}
    for row in table.select([*GROUP, "sample"]).to_pylist():
        chosen.setdefault((row["run"], row["kind"], row["step"]), set()).add((row["group"], row["sample"]))
    for run, kind, step in sorted(chosen):
        for row in runs[run].rollouts.rows_of(kind, step, chosen[run, kind, step]):
            yield {"run": runs[run].name} | row


def _csv_line(cells: Sequence[Any]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue()
