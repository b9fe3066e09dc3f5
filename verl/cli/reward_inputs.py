# SPDX-License-Identifier: Apache-2.0
"""Responses to score, read from a file. Imports torch."""

import itertools
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from verl.trainer.reward_samples import RowColumns
from verl.trainer.reward_trial import Response, one_turn


def read_responses(path: Path, rows: RowColumns, *, converses: bool = False) -> list[Response]:
    """Read responses from JSON lines and make responses to the same row adjacent.

    With `converses` a line without `num_turns` is a conversation of one turn.
    """
    if not path.is_file():
        raise FileNotFoundError(f"`--responses`: no file {path}")
    responses = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                responses.append(_read_response(number, json.loads(line), rows, converses=converses))
            except ValueError as error:
                raise ValueError(f"`--responses`: {path}, line {number}: {error}") from error
    if not responses:
        raise ValueError(f"`--responses`: {path} holds no responses")
    groups: dict[Hashable, list[Response]] = {}
    for response in responses:
        groups.setdefault(response.group, []).append(response)
    return list(itertools.chain.from_iterable(groups.values()))


def _read_response(number: int, entry: Any, rows: RowColumns, *, converses: bool) -> Response:
    if not isinstance(entry, dict) or not isinstance(entry.get("response"), str):
        raise ValueError("it must be an object with `response`, a text")
    if ("row" in entry) == ("ground_truth" in entry):
        raise ValueError(f"it must have either `row`, a number, or `ground_truth`, got {sorted(entry)}")
    given = {key: value for key, value in entry.items() if key != "row"}
    given = {"response_length": rows.count_tokens(entry["response"])} | given
    row = entry.get("row")
    if "row" in entry and not isinstance(row, int):
        raise ValueError(f"`row` must be a number, got {row!r:.80}")
    columns = (rows.of(row) if row is not None else {}) | given
    if converses:
        columns = one_turn(str(columns.get("prompt", "")), entry["response"]) | columns
    if row is None:
        return Response(f"line {number}", number, entry.get("uid", number), columns)
    return Response(f"line {number}, row {row}", row, ("row", row), columns)
