# SPDX-License-Identifier: Apache-2.0
"""Metrics of runs as CSV and JSONL: a line for each run and step."""

import csv
import io
import json
from collections.abc import Sequence

from verl.viewer.rollout_index import plain
from verl.viewer.runs import RunFolder

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of texts that a spreadsheet would compute


def metrics_csv(runs: Sequence[RunFolder]) -> str:
    """Return columns `run`, `step` and all metrics; a metric that a step lacks is empty."""
    logs = [run.metrics() for run in runs]
    names = sorted({name for log in logs for name in log["metrics"]})
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["run", "step", *map(_cell, names)])
    for run, log in zip(runs, logs, strict=True):
        columns = [log["metrics"].get(name) for name in names]
        for index, step in enumerate(log["step"]):
            writer.writerow([_cell(run.name), step, *(column and column[index] for column in columns)])
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


def _cell(text: str) -> str:
    """Return a text that spreadsheets show: names in a log may be anyone's."""
    return ("'" if text.startswith(FORMULA) else "") + plain(text)
