# SPDX-License-Identifier: Apache-2.0
"""Queries of the page: parsed from the address, checked, and executed on Arrow tables.

To add a filter: a field of `RolloutQuery`, a line in `from_params` and one in `_conditions`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.viewer.rollout_index import TABLE_SCHEMA, plain
from verl.viewer.runs import RunFolder

MAX_PAGE = 500  # rows
MAX_TEXT = 1000  # characters to search for
BINS = 30
SHOWN_DISTRIBUTIONS = ("score", "response_length")
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
        for name in ("step", "score", "advantage", "response_length"):
            smallest, largest = f"{name}_min", f"{name}_max"
            bounds[name] = (_real(smallest, take(smallest, "")), _real(largest, take(largest, "")))
        media = _one_of("media", take("media", ""), ("", "yes", "no"))
        query = cls(
            runs=tuple(dict.fromkeys(numbers)),
            text=_short("text", take("text", "")),
            bounds=bounds,
            equal={name: given.pop(name) for name in ("data_source", "finish_reason") if name in given},
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
    keys = dict.fromkeys((query.sort, "run", "step", "group", "sample"), "ascending")
    keys[query.sort] = "descending" if query.is_descending else "ascending"
    order = pc.sort_indices(table, sort_keys=[*keys.items()])  # pyright: ignore[reportAttributeAccessIssue]
    rows = table.take(order[query.offset : query.offset + query.limit])
    return {"total": table.num_rows, "rows": plain(rows.to_pylist())}


def choices(table: pa.Table) -> dict[str, list[str]]:
    """Return the values that the filters offer."""
    return {
        name: sorted(value for value in table[name].unique().to_pylist() if value is not None)[:100]
        for name in ("data_source", "finish_reason")
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
    for name, (smallest, largest) in query.bounds.items():
        if smallest is not None:
            yield pc.field(name) >= smallest
        if largest is not None:
            yield pc.field(name) <= largest
    for name, value in query.equal.items():
        yield pc.field(name) == value
    if query.has_media is not None:
        yield (pc.field("num_media") > 0) == query.has_media


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
