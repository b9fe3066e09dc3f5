# SPDX-License-Identifier: Apache-2.0
"""Samples to call a reward function with, made from rows or read from a file. Imports no torch."""

import itertools
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from verl.config.data import DataConfig
from verl.data.columns import answer_of
from verl.data.plain_files import Row

WRONG = "no such answer"  # used if no other row has another ground truth
NUM_SAMPLES = 3  # of a row


class Response(NamedTuple):
    """A response with the inputs of the reward function."""

    name: str  # for the user: its line and row
    number: int  # of the row over all files; of the line if it names no row
    group: Hashable  # equal for responses to the same row
    columns: dict[str, Any]


class SampledRows(Protocol):
    """Rows as a reward function gets them, without a response."""

    def first(self, count: int) -> dict[int, dict[str, Any]]:
        """Return the columns of the first usable rows, by their numbers."""
        ...

    def of(self, row: int) -> dict[str, Any]:
        """Return the columns of a row, given by its number over all files."""
        ...

    def count_tokens(self, response: str) -> int: ...


class PlainRows:
    """Inputs of the reward function from rows that no model has read: `prompt` is plain text."""

    def __init__(self, rows: Sequence[Row], data: DataConfig) -> None:
        self._rows, self._data = rows, data

    def first(self, count: int) -> dict[int, dict[str, Any]]:
        sources = [row.get(self._data.source_key) if self._data.sources else None for row in self._rows]
        firsts = {sources.index(source) for source in sources}  # of each source of a mixture
        order = sorted(range(len(sources)), key=lambda number: number not in firsts)
        return {number: self.of(number) for number in order[: max(count, len(firsts))]}

    def of(self, row: int) -> dict[str, Any]:
        columns, data = self._rows[row], self._data
        media = {data.image_key, data.video_key, data.audio_key}
        others = {name: value for name, value in columns.items() if name not in media}
        truth = answer_of(columns, data.answer_key)
        own = {"ground_truth": truth, "prompt": str(columns[data.prompt_key])}
        return others | own | {"uid": f"row-{row}", "multi_modal_data": None}

    def count_tokens(self, response: str) -> int:
        return len(response.split())


def sample_responses(rows: SampledRows, count: int, *, converses: bool = False) -> list[Response]:
    """Make three responses to each of the first usable rows: its ground truth, nothing, a wrong answer.

    With `converses` each is a conversation of one turn without calls.
    """
    columns = rows.first(count)
    truths = [str(seen["ground_truth"]) for seen in columns.values()]
    responses = []
    for position, (truth, (row, seen)) in enumerate(zip(truths, columns.items(), strict=True)):
        # The wrong answer is the ground truth of the next row that has another one.
        others = [other for other in truths[position:] + truths[:position] if other != truth]
        samples = {"ground truth": truth, "empty": "", "wrong": others[0] if others else WRONG}
        for name, text in samples.items():
            given = {"response": text, "response_length": rows.count_tokens(text)}
            given |= one_turn(seen["prompt"], text) if converses else {}
            responses.append(Response(f"row {row}, {name}", row, row, seen | given))
    return responses


def one_turn(prompt: str, response: str) -> dict[str, Any]:
    """Return the inputs that a conversation of one turn has in addition, see `conversation_columns`."""
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    turn = {"num_turns": 1, "tool_calls": [], "tool_rewards": [None]}
    return {"messages": messages, "contexts": [messages]} | turn


def read_responses(path: Path, rows: SampledRows, *, converses: bool = False) -> list[Response]:
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


def _read_response(number: int, entry: Any, rows: SampledRows, *, converses: bool) -> Response:
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
