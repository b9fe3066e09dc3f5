# SPDX-License-Identifier: Apache-2.0
"""Queries of the page: parsed from the address, checked, executed on Arrow tables, and exported.

To add a filter: a field of `RolloutQuery`, a line in `from_params` and one in `_conditions`.

Metrics and rollouts are exported as parts of files in the formats of `FORMATS`. In CSV, lists and mappings
are JSON, and a text that a spreadsheet would take for a formula begins with an apostrophe.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.viewer.rollout_index import EXPORTED, TABLE_SCHEMA, distinct_starts, plain
from verl.viewer.rollout_store import FILE_PREFIXES
from verl.viewer.runs import RunFolder

MAX_PAGE = 500  # rows
MAX_TEXT = 1000  # characters to search for
BINS = 30
SHOWN_DISTRIBUTIONS = ("score", "response_length")
BOUNDED = ("step", "score", "advantage", "response_length", "num_turns", "num_calls", "num_failures")
EQUAL = ("kind", "data_source", "finish_reason", "stop_reason")  # columns that a filter compares
GROUP = ("run", "kind", "step", "group")  # columns that identify a prompt in a step
SORTABLE = ("run", *(name for name in TABLE_SCHEMA.names if not name.endswith("_start")))


@dataclass(frozen=True)
class RolloutQuery:
    """Filters, order and page; None disables a filter."""

    runs: tuple[int, ...]  # indices of the runs
    text: str  # in the prompt, the response or the ground truth
    bounds: Mapping[str, tuple[float | None, float | None]]  # column -> inclusive minimum and maximum
    equal: Mapping[str, str]  # column -> value: {"finish_reason": "length"}
    has_media: bool | None
    sort: str  # column; ties are in the order of run, step, group and sample
    is_descending: bool
    offset: int  # rows before the page
    limit: int  # rows of the page

    @classmethod
    def from_params(cls, params: Sequence[tuple[str, str]], num_runs: int) -> "RolloutQuery":
        """Parse the parameters of an address; an empty one counts as missing."""
        numbers = [_number(name, text, 0, num_runs - 1) for name, text in params if name == "run"]
        given = {name: text for name, text in params if name != "run" and text}
        take = given.pop
        bounds = {}
        for name in BOUNDED:
            smallest, largest = f"{name}_min", f"{name}_max"
            bounds[name] = (_real(smallest, take(smallest, "")), _real(largest, take(largest, "")))
        _one_of("kind", given.get("kind", ""), ("", *FILE_PREFIXES))
        media = _one_of("media", take("media", ""), ("", "yes", "no"))
        query = cls(
            runs=tuple(dict.fromkeys(numbers)),
            text=_short("text", take("text", "")),
            bounds=bounds,
            equal={name: given.pop(name) for name in EQUAL if name in given},
            has_media=None if not media else media == "yes",
            sort=_one_of("sort", take("sort", "step"), SORTABLE),
            is_descending=_one_of("order", take("order", "up"), ("up", "down")) == "down",
            offset=_number("offset", take("offset", "0"), 0, 2**31),
            limit=_number("limit", take("limit", "100"), 1, MAX_PAGE),
        )
        if given:
            raise ValueError(f"unknown parameters {sorted(given)}")
        return query


def select(runs: Sequence[RunFolder], query: RolloutQuery) -> pa.Table:
    """Return the matching rows of the chosen runs, unsorted, with an additional column `run`."""
    tables = []
    for number in query.runs:
        index = runs[number].rollouts
        table = index.search(query.text) if query.text else index.refresh()
        column = pa.array(np.full(table.num_rows, number, dtype=np.int32))
        tables.append(table.append_column("run", column))
    empty = TABLE_SCHEMA.append(pa.field("run", pa.int32())).empty_table()
    table = pa.concat_tables([empty, *tables])
    for condition in _conditions(query):
        table = table.filter(condition)
    return table


def page(table: pa.Table, query: RolloutQuery) -> dict[str, Any]:
    """Return one page of the sorted rows, and the total number of rows."""
    rows = table.take(_order(table, query)[query.offset : query.offset + query.limit])
    return {"total": table.num_rows, "rows": plain(rows.to_pylist())}


def with_prompts(runs: Sequence[RunFolder], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `question`, the prompt as people read it, and `thumbnail` to the rows of a page."""
    groups: dict[int, set[tuple[str, int, str]]] = {}
    for row in rows:
        groups.setdefault(row["run"], set()).add((row["kind"], row["step"], row["group"]))
    views = {run: runs[run].rollouts.prompts(keys) for run, keys in groups.items()}
    found = [views[row["run"]].get((row["kind"], row["step"], row["group"])) for row in rows]
    texts = [view.text if view else row["prompt_start"] or "" for view, row in zip(found, rows, strict=True)]
    return [
        row | {"question": plain(text), "thumbnail": view and view.thumbnail}
        for row, text, view in zip(rows, distinct_starts(texts), found, strict=True)
    ]


def neighbors(table: pa.Table, query: RolloutQuery, group: tuple[int, str, int, str]) -> dict[str, Any]:
    """Return the groups before and after one in the sorted rows, and its place: `position` of `total`.

    A group is where its first row is. All are None for a group that the filters leave out.
    """
    order = _order(table, query)
    numbers = np.zeros(table.num_rows, dtype=np.int64)  # of the group of each sorted row
    for name in GROUP:
        codes = table[name].take(order).combine_chunks().dictionary_encode(null_encoding="encode").indices
        _, numbers = np.unique(numbers * (table.num_rows + 1) + codes.to_numpy(), return_inverse=True)
    firsts = np.sort(np.unique(numbers, return_index=True)[1])
    heads = table.select(GROUP).take(order.take(pa.array(firsts)))
    is_group = pc.scalar(True)
    for name, value in zip(GROUP, group, strict=True):
        is_group = is_group & (pc.field(name) == value)
    indexed = heads.append_column("index", pa.array(np.arange(len(heads))))
    here = indexed.filter(is_group)["index"].to_pylist()
    if not here:
        return {"position": None, "total": len(heads), "previous": None, "next": None}
    before, after = here[0] - 1, here[0] + 1
    return plain({
        "position": here[0] + 1,
        "total": len(heads),
        "previous": heads.slice(before, 1).to_pylist()[0] if before >= 0 else None,
        "next": heads.slice(after, 1).to_pylist()[0] if after < len(heads) else None,
    })  # fmt: skip


def prompt_history(table: pa.Table) -> list[dict[str, Any]]:
    """Summarize the responses to one prompt by group, in the order of the steps.

    Returns:
        For each `kind`, `step` and `group` the `mean`, `min` and `max` of its known scores, and its `rows`.
    """
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in plain(table.to_pylist()):
        groups.setdefault((row["kind"], row["step"], row["group"]), []).append(row)
    history = []
    for kind, step, group in sorted(groups, key=lambda key: (key[1], key[0], key[2])):
        rows = groups[kind, step, group]
        scores = [row["score"] for row in rows if row["score"] is not None]
        statistics = {
            "mean": sum(scores) / len(scores) if scores else None,
            "min": min(scores, default=None),
            "max": max(scores, default=None),
        }
        in_order = sorted(rows, key=lambda row: row["sample"])
        history.append({"kind": kind, "step": step, "group": group} | statistics | {"rows": in_order})
    return history


def _order(table: pa.Table, query: RolloutQuery) -> pa.Array:
    keys = dict.fromkeys((query.sort, "run", "step", "kind", "group", "sample"), "ascending")
    keys[query.sort] = "descending" if query.is_descending else "ascending"
    return pc.sort_indices(table, sort_keys=[*keys.items()])  # pyright: ignore[reportAttributeAccessIssue]


def choices(table: pa.Table) -> dict[str, list[str]]:
    """Return the values that the filters offer."""
    return {
        name: sorted(value for value in table[name].unique().to_pylist() if value is not None)[:100]
        for name in EQUAL
    }


def distributions(table: pa.Table, runs: Sequence[int]) -> dict[str, Any]:
    """Return histograms of scores and lengths over common edges, by run; no edges without rows."""
    return {name: _histogram(table, name, runs) for name in SHOWN_DISTRIBUTIONS}


def _histogram(table: pa.Table, name: str, runs: Sequence[int]) -> dict[str, Any]:
    numbers = table["run"].to_numpy()
    values = table[name].to_numpy().astype(float)  # null becomes nan
    is_known = np.isfinite(values)
    if not is_known.any():
        return {"edges": [], "counts": {}}
    edges = np.histogram_bin_edges(values[is_known], bins=BINS)
    counts = {
        str(run): np.histogram(values[is_known & (numbers == run)], bins=edges)[0].tolist() for run in runs
    }
    return {"edges": edges.tolist(), "counts": counts}


def _conditions(query: RolloutQuery) -> Iterator[pc.Expression]:
    for name, bounds in query.bounds.items():
        smallest, largest = (_as_stored(name, bound) for bound in bounds)
        if smallest is not None:
            yield pc.field(name) >= smallest
        if largest is not None:
            yield pc.field(name) <= largest
    for name, value in query.equal.items():
        yield pc.field(name) == value
    if query.has_media is not None:
        yield (pc.field("num_media") > 0) == query.has_media


def _as_stored(name: str, bound: float | None) -> float | None:
    # A stored score of 0.9 is the nearest float32, which is below 0.9.
    if bound is None or TABLE_SCHEMA.field(name).type != pa.float32():
        return bound
    with np.errstate(over="ignore"):
        return float(np.float32(bound))


def _number(name: str, text: str, smallest: int, largest: int) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) < 20
    if not is_number or not smallest <= int(text) <= largest:
        raise ValueError(f"`{name}` must be an integer from {smallest} to {largest}, got {text[:40]!r}")
    return int(text)


def _real(name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be a number, got {text[:40]!r}")
    return number


def _short(name: str, text: str) -> str:
    if len(text) > MAX_TEXT:
        raise ValueError(f"`{name}` must have at most {MAX_TEXT} characters, got {len(text)}")
    return text


def _one_of(name: str, text: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise ValueError(f"`{name}` must be one of {list(allowed)}, got {text[:40]!r}")
    return text


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
