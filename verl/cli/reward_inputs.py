# SPDX-License-Identifier: Apache-2.0
"""Responses to score without a model: read from a file, or made from the rows of the data. Imports torch."""

import itertools
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

from verl.data.bad_rows import BadRow, BadRowError
from verl.data.rl_dataset import RLHFDataset, collate_fn
from verl.protocol import DataProto
from verl.trainer.rollouts.sampler import reward_columns, with_uids

WRONG = "no such answer"  # used if no other row has another ground truth


class Response(NamedTuple):
    """A response with the inputs of the reward function."""

    name: str  # for the user: its line and row
    number: int  # of the row over all files; of the line if it names no row
    group: Hashable  # equal for responses to the same row
    columns: dict[str, Any]


class RowColumns:
    """The reward function's inputs for rows as in a run, except the response and its length."""

    def __init__(self, dataset: RLHFDataset) -> None:
        self.dataset = dataset
        self._positions = {row: position for position, row in enumerate(dataset.indices)}
        self._bad = {row.index: row for row in dataset.bad_rows}

    def of(self, row: int) -> dict[str, Any]:
        """Return the columns of a row, given by its number over all files."""
        if not 0 <= row < len(self.dataset.rows):
            raise ValueError(f"row {row} must be one of 0 to {len(self.dataset.rows) - 1}")
        item = self._bad[row] if row in self._bad else self.dataset[self._positions[row]]
        if isinstance(item, BadRow):
            raise BadRowError(f"row {row} is bad: {item}")
        prompts = with_uids(DataProto.from_single_dict(collate_fn([item])), f"row-{row}")
        return reward_columns(prompts)[0]

    def first(self, count: int) -> dict[int, dict[str, Any]]:
        """Return the columns of the first usable rows, by their numbers."""
        found: dict[int, dict[str, Any]] = {}
        reason = None
        for row in itertools.takewhile(lambda _: len(found) < count, self.dataset.indices):
            try:
                found[row] = self.of(row)
            except BadRowError as error:
                reason = error
        if not found:
            raise ValueError(f"no row can be used; the last: {reason}")
        return found

    def count_tokens(self, response: str) -> int:
        return len(self.dataset.tokenizer.encode(response, add_special_tokens=False))


def read_responses(path: Path, rows: RowColumns) -> list[Response]:
    """Read responses from JSON lines and make responses to the same row adjacent."""
    if not path.is_file():
        raise FileNotFoundError(f"`--responses`: no file {path}")
    responses = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                responses.append(_read_response(number, json.loads(line), rows))
            except ValueError as error:
                raise ValueError(f"`--responses`: {path}, line {number}: {error}") from error
    if not responses:
        raise ValueError(f"`--responses`: {path} holds no responses")
    groups: dict[Hashable, list[Response]] = {}
    for response in responses:
        groups.setdefault(response.group, []).append(response)
    return list(itertools.chain.from_iterable(groups.values()))


def _read_response(number: int, entry: Any, rows: RowColumns) -> Response:
    if not isinstance(entry, dict) or not isinstance(entry.get("response"), str):
        raise ValueError("it must be an object with `response`, a text")
    if ("row" in entry) == ("ground_truth" in entry):
        raise ValueError(f"it must have either `row`, a number, or `ground_truth`, got {sorted(entry)}")
    given = {key: value for key, value in entry.items() if key != "row"}
    given = {"response_length": rows.count_tokens(entry["response"])} | given
    if "row" not in entry:
        return Response(f"line {number}", number, entry.get("uid", number), given)
    row = entry["row"]
    if not isinstance(row, int):
        raise ValueError(f"`row` must be a number, got {row!r:.80}")
    return Response(f"line {number}, row {row}", row, ("row", row), rows.of(row) | given)


def sample_responses(rows: RowColumns, count: int) -> list[Response]:
    """Make three responses to each of the first usable rows: its ground truth, nothing, a wrong answer."""
    columns = rows.first(count)
    truths = [str(seen["ground_truth"]) for seen in columns.values()]
    responses = []
    for position, (truth, (row, seen)) in enumerate(zip(truths, columns.items(), strict=True)):
        # The wrong answer is the ground truth of the next row that has another one.
        others = [other for other in truths[position:] + truths[:position] if other != truth]
        samples = {"ground truth": truth, "empty": "", "wrong": others[0] if others else WRONG}
        for name, text in samples.items():
            given = {"response": text, "response_length": rows.count_tokens(text)}
            responses.append(Response(f"row {row}, {name}", row, row, seen | given))
    return responses
