# SPDX-License-Identifier: Apache-2.0
"""Rollouts of one run in memory: a table of the short columns; the rest is read on demand.

Prompts are as people read them: without tokens of chat templates, shortened to what tells them apart.
"""

import json
import math
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from verl.viewer.rollout_store import FILE_PREFIXES, SCHEMA, TABLE_COLUMNS, TOKEN_COLUMNS, step_files

KIND = pa.field("kind", pa.string())  # "train" or "validation"
TABLE_SCHEMA = pa.schema([KIND, *(SCHEMA.field(name) for name in TABLE_COLUMNS)])
PROMPT_COLUMNS = ["group", "messages", "prompt_start", "media"]
# Without lists of tokens.
EXPORTED = [name for name in SCHEMA.names if not name.endswith("_start") and name not in TOKEN_COLUMNS]
CACHED_FILES = 512  # whose prompts are kept in memory
UNREADABLE = (pa.ArrowException, OSError, ValueError)  # raised for damaged files; the last for texts
SPECIAL_TOKEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_(?:turn|image)>|</?s>|<[be]os>|\[/?INST\]"
)
KEPT_LENGTH = 20_000  # characters of a prompt that are compared with others
SHOWN_LENGTH = 240  # characters of a prompt in the table
MIN_COMMON = 40  # characters: a shorter common start stays
CONTEXT = 16  # characters of the common start before the difference
Signature = tuple[int, int]  # modification time in ns, bytes
File = tuple[str, int]  # kind and step


class PromptView(NamedTuple):
    """A prompt in the table."""

    text: str
    thumbnail: str | None  # file of the first image or frame in the media folder


class RolloutIndex:
    """Index of a run's kept rollouts; `problems` has the unreadable files, which are skipped.

    Example::

        index = RolloutIndex(Path("checkpoints/math/first"))
        index.refresh().num_rows
        index.group("train", step=12, group="step12-0-0")
    """

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.problems: dict[str, str] = {}
        self._table = TABLE_SCHEMA.empty_table()
        self._known: dict[File, Signature] = {}
        self._lock, self._search_lock = threading.Lock(), threading.Lock()
        self._searched = ("", self._table, self._table)  # last text, searched table, result

    def refresh(self) -> pa.Table:
        """Read new and changed files; return the columns of `TABLE_SCHEMA` of all rollouts, unsorted."""
        with self._lock:
            files = self._files()
            found = {file: seen for file, path in files.items() if (seen := signature(path))}
            changed = [file for file, seen in found.items() if self._known.get(file) != seen]
            stale = [file for file in self._known if found.get(file) != self._known[file]]
            for kind in FILE_PREFIXES:
                if steps := [step for one, step in stale if one == kind]:
                    is_stale = pc.field("step").isin(steps) & (pc.field("kind") == kind)
                    self._table = self._table.filter(~is_stale)
            if changed:
                for file in changed:
                    self.problems.pop(files[file].name, None)
                read = self._read({file: files[file] for file in changed})
                self._table = pa.concat_tables([self._table, read]).combine_chunks()
            self._known = found
            return self._table

    def search(self, text: str) -> pa.Table:
        """Return the rows whose prompt, response or ground truth contains a text, ignoring case."""
        table = self.refresh()
        with self._search_lock:  # the page requests rows and histograms together: search once
            last_text, last_table, found = self._searched
            if last_text != text or last_table is not table:
                found = self._search(text)
                self._searched = (text, table, found)
            return found

    def group(self, kind: str, step: int, group: str) -> list[dict[str, Any]]:
        """Return all columns of the responses to a prompt as JSON values."""
        path = step_files(self.run_folder, kind).get(step)
        if path is None:
            raise KeyError(f"{self.run_folder} keeps no {kind} rollouts of step {step}")
        try:
            rows = pq.read_table(path, schema=SCHEMA, filters=ds.field("group") == group).to_pylist()
        except UNREADABLE as error:
            raise KeyError(f"{path} cannot be read: {error}") from error
        if not rows:
            raise KeyError(f"step {step} has no group {group!r}")
        return [json_row(row) | {"kind": kind} for row in rows]

    def prompts(self, groups: Collection[tuple[str, int, str]]) -> dict[tuple[str, int, str], PromptView]:
        """Return the prompts of groups, given as kind, step and group; unreadable ones are left out."""
        views: dict[tuple[str, int, str], PromptView] = {}
        files = self._files()
        for kind, step in sorted({(kind, step) for kind, step, _ in groups if (kind, step) in files}):
            found = _prompts_of(files[kind, step], signature(files[kind, step]))
            views |= {(kind, step, group): view for group, view in found.items()}
        return {group: views[group] for group in groups if group in views}

    def same_prompt(self, kind: str, step: int, group: str) -> pa.Table:
        """Return the responses to the same text and media in all steps, as `refresh` does."""
        first, *_ = self.group(kind, step, group)
        rows = ds.field("prompt") == first["prompt"]
        if first["ground_truth"] is not None:
            rows &= ds.field("ground_truth") == first["ground_truth"]
        table = self._read(self._readable_files(), rows, ["media"])
        wanted = _contents(first["media"])
        is_same = [_contents(media) == wanted for media in table["media"].to_pylist()]
        return table.filter(pa.array(is_same, pa.bool_())).drop_columns(["media"])

    def rows_of(self, kind: str, step: int, samples: Collection[tuple[str, int]]) -> Iterator[dict[str, Any]]:
        """Yield the columns `EXPORTED` of rows of a file, given as group and sample, as JSON values."""
        path = step_files(self.run_folder, kind).get(step)
        try:
            table = pq.read_table(path, columns=EXPORTED, schema=SCHEMA) if path is not None else None
        except UNREADABLE:  # damaged since the table was read
            return
        for row in [] if table is None else table.to_pylist():
            if (row["group"], row["sample"]) in samples:
                yield {"kind": kind} | json_row(row)

    def _files(self) -> dict[File, Path]:
        return {
            (kind, step): path
            for kind in FILE_PREFIXES
            for step, path in step_files(self.run_folder, kind).items()
        }

    def _readable_files(self) -> dict[File, Path]:
        return {file: path for file, path in self._files().items() if path.name not in self.problems}

    def _search(self, text: str) -> pa.Table:
        contains = pc.match_substring  # pyright: ignore[reportAttributeAccessIssue] - made at import
        in_prompt, in_response, in_truth = (
            contains(ds.field(name), text, ignore_case=True)
            for name in ("prompt", "response", "ground_truth")
        )
        return self._read(self._readable_files(), in_prompt | in_response | in_truth)

    def _read(
        self, files: dict[File, Path], rows: ds.Expression | None = None, more: Collection[str] = ()
    ) -> pa.Table:
        empty = pa.schema([*TABLE_SCHEMA, *(SCHEMA.field(name) for name in more)]).empty_table()
        tables = [empty]
        for kind in FILE_PREFIXES:
            paths = [path for (one, _), path in files.items() if one == kind]
            for table in self._read_files(paths, rows, [*TABLE_COLUMNS, *more]):
                tables.append(table.add_column(0, KIND, pa.repeat(pa.scalar(kind), table.num_rows)))
        return pa.concat_tables(tables)

    def _read_files(
        self, paths: list[Path], rows: ds.Expression | None, columns: list[str]
    ) -> Iterator[pa.Table]:
        if not paths:
            return
        try:
            data = ds.dataset([str(path) for path in paths], schema=SCHEMA, format="parquet")
            table = data.to_table(columns=columns, filter=rows)
            table.validate(full=True)  # texts may be no UTF-8
            yield table
        except UNREADABLE as error:
            if len(paths) == 1:
                self.problems[paths[0].name] = str(error)
                return
            for path in paths:  # one of them is damaged: find it
                yield from self._read_files([path], rows, columns)


@lru_cache(CACHED_FILES)
def _prompts_of(path: Path, version: Signature | None) -> dict[str, PromptView]:  # version: of its content
    try:
        rows = pq.read_table(path, columns=PROMPT_COLUMNS, schema=SCHEMA).to_pylist()
    except UNREADABLE:
        return {}
    first = {row["group"]: row for row in reversed(rows)}  # the responses share their prompt
    return {group: prompt_view(row) for group, row in first.items()}


def json_row(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a stored row to JSON values."""
    return plain(row | {"reward_values": dict(row["reward_values"] or [])})


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


def _contents(media: Any) -> list[tuple[Any, ...]]:
    """Identify media: small copies are named by their content, others are known by their source."""
    return [(one["kind"], *(one["files"] or [one["source"]])) for one in media or [] if one]


def signature(path: Path) -> Signature | None:
    """Return what changes with the content of a file; None if it is missing."""
    try:
        status = path.stat()
    except OSError:  # removed since it was listed
        return None
    return status.st_mtime_ns, status.st_size


def prompt_view(row: dict[str, Any]) -> PromptView:
    """Read a stored row with the columns `messages`, `prompt_start` and `media`."""
    text = conversation(row["messages"])
    if text is None:
        text = SPECIAL_TOKEN.sub(" ", row["prompt_start"] or "")
    files = (file for medium in row["media"] or [] if medium for file in medium["files"] or [])
    return PromptView(" ".join(text[:KEPT_LENGTH].split()), next(files, None))


def conversation(messages: str | None) -> str | None:
    """Return the texts of the messages, without the system's if there are others; None if unreadable."""
    try:
        parsed = json.loads(messages or "")
        turns = [(message["role"], _text_of(message["content"])) for message in parsed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    spoken = [text for role, text in turns if role != "system"]
    return "\n".join(spoken or [text for _, text in turns])


def distinct_starts(texts: Sequence[str]) -> list[str]:
    """Shorten each text to its start, or, if all begin alike, to a part near their first difference."""
    first, last = min(texts, default=""), max(texts, default="")  # what they share, all texts share
    pairs = enumerate(zip(first, last, strict=False))
    common = next((number for number, (one, other) in pairs if one != other), 0)
    if common < MIN_COMMON:
        return [text[:SHOWN_LENGTH] for text in texts]
    start = first.rfind(" ", 0, common - CONTEXT) + 1
    return [f"… {text[start:][:SHOWN_LENGTH]}" for text in texts]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if isinstance(part.get("text"), str))
