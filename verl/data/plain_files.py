# SPDX-License-Identifier: Apache-2.0
"""Files of rows that Python reads by itself, the splits of a folder, and the first rows of any file.

Nothing here imports torch or `datasets`: what is wrong with a file can be said at once. `files.py` opens
whole data sets with it.
"""

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from verl.data.bad_rows import BadRowError
from verl.utils.processes.child_process import ChildEndedError, limit_memory
from verl.utils.processes.isolated_calls import IsolatedCalls

Row = dict[str, Any]
DEFAULT_SPLIT = "train"
SPLIT_NAMES = {
    "train": r"train(ing)?", "validation": r"valid(ation)?|val|dev", "test": r"test(ing)?|eval(uation)?",
}  # fmt: skip
SPLIT_SLICE = re.compile(r"(?P<name>[^\[\]]+)(?P<slice>\[.*\])?")
TEXT = "utf-8-sig"  # UTF-8, with the mark that Excel and Windows write first
FIRST_ROWS = 256
FIRST_BYTES = 16 << 20  # of a file of text, which are read in a tenth of a second
TABLE_BYTES, TABLE_MEMORY, TABLE_TIMEOUT_S = 32 << 20, 4 << 30, 10.0  # to decode the first rows of a table

# What the messages of Python's parser mean to someone who wrote the line.
JSON_FAULTS = {
    "Unterminated string starting at": "a string is not closed",
    "Expecting ',' delimiter": "a comma, or a bracket at the end, is missing",
    "Expecting ':' delimiter": "a colon is missing",
    "Expecting property name enclosed in double quotes": "a name in double quotes is missing",
    "Expecting value": "a value is missing",
    "Extra data": "the row ends here, but more follows",
    "Invalid control character at": r"a string has a tab or a line break: write \t or \n",
    "Illegal trailing comma before end of object": "the last comma is too many",
    "Illegal trailing comma before end of array": "the last comma is too many",
}
CSV_FAULTS = {
    "unexpected end of data": "a quote is opened and never closed",
    "expected after": "text follows a closing quote: a quote inside a quoted field is written twice",
}
OTHER_DELIMITER = re.compile(r"[\w .-]+([;\t|])[\w .-]+(?:\1[\w .-]+)*")


class Source:
    """The rows of one file or hub data set, with its name for errors and its sorted columns."""

    def __init__(self, name: str, rows: Any, columns: list[str] | None = None) -> None:
        self.name = name
        self.rows = rows
        # A file without a schema has the columns of all its rows.
        self.columns = sorted(columns if columns is not None else {key for row in rows for key in row})

    def row(self, index: int) -> Row:
        """Return a row; a BadRowError names the column of a date or duration that only Arrow can hold."""
        try:
            return dict(self.rows[index])
        except OverflowError as error:
            for column in self.columns if len(self.columns) > 1 else ():
                Source(self.name, self.rows.select_columns([column]), [column]).row(index)
            rule = "dates must be of the years 1 to 9999"
            raise BadRowError(f"column `{self.columns[0]}`: {error}; {rule}") from error


def named(source: Source, column: str) -> Source:
    """Return a source of a mixture: its rows will get a column with its name.

    Raises:
        ValueError: They have a column of that name.
    """
    if column in source.columns:
        raise ValueError(
            f"{source.name} has a column `{column}`, which a mixture uses for the name of a row's source: set"
            " `data.source_key` to another name"
        )
    return Source(source.name, source.rows, [*source.columns, column])


class FirstRows(NamedTuple):
    """The first rows of a file."""

    source: Source
    are_all: bool  # the file has no more


def _row_of(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        check_unique([name for name, _ in pairs])
    return row


JSON = json.JSONDecoder(object_pairs_hook=_row_of)


def check_unique(columns: Iterable[str]) -> None:
    """Raise a ValueError if a column would hide another of its name."""
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise ValueError(f"it has more than one column {twice[0]!r}")


def json_fault(error: json.JSONDecodeError) -> str:
    """Say what is wrong with a text and at which column of its line."""
    reason = next((JSON_FAULTS[msg] for msg in JSON_FAULTS if error.msg.startswith(msg)), error.msg)
    if not error.doc[error.pos :].strip():
        reason = f"it ends too early: {reason}"
    return f"{reason} (column {error.colno})"


def parse_lines(lines: Iterable[str]) -> list[Row]:
    """Parse JSON lines; a ValueError names the line as an editor counts it."""
    return [parse_line(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def parse_line(number: int, line: str) -> Row:
    """Parse one of the JSON lines that is not blank; a ValueError names it."""
    text = line.rstrip("\r\n")  # else the end of a broken line counts as the start of another
    try:
        row = JSON.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON: {json_fault(error)}") from error
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(
            f'line {number} must be a row, such as {{"prompt": "2 + 3", "answer": "5"}}, got {text:.80}'
        )
    return row


def read_jsonl(path: Path) -> Source:
    # Rows keep their own types: a prompt may be a string in one row and a list of messages in another.
    with path.open(encoding=TEXT) as lines:
        return Source(str(path), parse_lines(lines))


def read_json(path: Path) -> Source:
    """Read a list of rows, `{"data": [rows]}`, columns as lists, or one row per line."""
    text = path.read_text(encoding=TEXT)
    try:
        return from_object(path, JSON.decode(text))
    except json.JSONDecodeError as error:
        first = text.lstrip().partition("\n")[0].rstrip()
        if first[:1] + first[-1:] == "{}":  # a row, so the file has one in each line
            return read_jsonl(path)
        raise ValueError(f"line {error.lineno} is not JSON: {json_fault(error)}") from error


def read_csv(path: Path) -> Source:
    return _read_csv(path, None).source


def _read_csv(path: Path, limit: int | None) -> FirstRows:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding=TEXT, newline="") as lines:
        records = _csv_records(lines)
        columns = next(records, [])
        _check_header(columns)
        rows = [dict(zip(columns, fields, strict=True)) for fields in islice(records, limit)]
        are_all = limit is None or next(records, None) is None
    return FirstRows(Source(str(path), rows, columns), are_all)


def _csv_records(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the fields of each record, the header's first; a ValueError names the line that one starts at."""
    reader, width, start = csv.reader(lines, strict=True), None, 1
    try:
        for fields in reader:
            width = width or len(fields)
            if fields and len(fields) != width:
                raise ValueError(f"line {start} has {len(fields)} fields, and the header has {width}")
            if fields:
                yield fields
            start = reader.line_num + 1
    except csv.Error as error:
        reason = next((CSV_FAULTS[msg] for msg in CSV_FAULTS if msg in str(error)), str(error))
        raise ValueError(f"the row that starts at line {start} is not CSV: {reason}") from error


def _check_header(columns: list[str]) -> None:
    check_unique(columns)
    if len(columns) == 1 and (other := OTHER_DELIMITER.fullmatch(columns[0])):
        raise ValueError(
            f"the header is one column, {columns[0]!r}: separate the fields by commas, not by {other[1]!r}"
        )


def from_object(path: Path, content: Any) -> Source:
    """Read rows from a list of rows, or from columns as lists."""
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if isinstance(content, dict):
        lengths = {len(column) if isinstance(column, list) else -1 for column in content.values()}
        if len(lengths) != 1 or lengths == {-1}:
            content = [content]
        else:
            columns = zip(*content.values(), strict=True)
            content = [dict(zip(content, values, strict=True)) for values in columns]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError("it must contain a list of rows, each a dictionary of columns")
    odd = next((key for row in content for key in row if not isinstance(key, str)), None)
    if odd is not None:
        raise ValueError(f"the names of columns must be text, got {odd!r:.80}")
    return Source(str(path), content)


def unreadable(path: Path, error: Exception) -> ValueError:
    """Return the error of a file that cannot be read, with the reason said once."""
    if isinstance(error, UnicodeDecodeError):
        return ValueError(f"{path} cannot be read: {_encoding_fault(path)}: save the file as UTF-8")
    reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return ValueError(f"{path} cannot be read: {reason}")


def no_rows(option: str, names: Iterable[str]) -> ValueError:
    return ValueError(f"`{option}` ({', '.join(names)}) has no rows")


def _encoding_fault(path: Path) -> str:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.startswith((b"\xff\xfe", b"\xfe\xff")) and number == 1:
                return "it is UTF-16"
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"line {number} is not UTF-8 (byte 0x{line[error.start]:02x})"
    return "it is not UTF-8"


def first_rows(path: Path) -> FirstRows | None:
    """Read the first rows of a file; None if that takes long, or would run code (a pickle).

    Raises:
        ValueError: The file cannot be read.
    """
    reader = FIRST_READERS.get(path.suffix)
    if reader is None:
        return None
    if path.stat().st_size == 0:
        return FirstRows(Source(str(path), []), are_all=True)
    try:
        return reader(path)
    except (TimeoutError, ChildEndedError):  # opening the whole file says what it is
        return None
    except Exception as error:  # the readers of four formats raise many types
        raise unreadable(path, error) from error


def _first_lines(path: Path) -> FirstRows:
    with path.open(encoding=TEXT) as lines:
        chosen = lines.readlines(FIRST_BYTES)
        are_all = not lines.readline()
    return FirstRows(Source(str(path), parse_lines(chosen)), are_all)


def _first_of_json(path: Path) -> FirstRows | None:
    if path.stat().st_size > FIRST_BYTES:
        return None
    return FirstRows(read_json(path), are_all=True)


def _first_of_table(path: Path) -> FirstRows | None:
    # The sizes in a damaged file may be wrong, and some small files become very large.
    limit = partial(limit_memory, TABLE_MEMORY)
    with closing(IsolatedCalls(_decode_first, TABLE_TIMEOUT_S, limit)) as calls:
        found = calls(path)
    if found is None:
        return None
    columns, rows, are_all = found
    check_unique(columns)
    return FirstRows(Source(str(path), rows, columns), are_all)


def _decode_first(path: Path) -> tuple[list[str], list[Row], bool] | None:
    import pyarrow as pa  # noqa: PLC0415 (only here: the command itself stays small)

    try:
        return _arrow_rows(path) if path.suffix == ".arrow" else _parquet_rows(path)
    except OverflowError:  # a bad row, which opening the whole file tells from the others
        return None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error


def _parquet_rows(path: Path) -> tuple[list[str], list[Row], bool]:
    import pyarrow.parquet as pq  # noqa: PLC0415

    with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        names, total = file.schema_arrow.names, file.metadata.num_rows
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        size = sum(group.total_byte_size for group in groups) // max(1, total)
        count = max(1, min(FIRST_ROWS, TABLE_BYTES // max(1, size)))
        batch = next(file.iter_batches(batch_size=count, use_threads=False), None)
        rows = [] if batch is None else batch.to_pylist()
    return names, rows, len(rows) == total


def _arrow_rows(path: Path) -> tuple[list[str], list[Row], bool]:
    names, batches = arrow_batches(path)
    batch = next(batches, None)
    if batch is None:
        return names, [], True
    size = batch.nbytes // max(1, batch.num_rows)
    count = max(1, min(FIRST_ROWS, TABLE_BYTES // max(1, size)))
    return names, batch.slice(0, count).to_pylist(), False


def arrow_batches(path: Path) -> tuple[list[str], Iterator[Any]]:
    """Return the columns of an Arrow file, which may be a stream, and the batches of its rows."""
    import pyarrow as pa  # noqa: PLC0415

    source = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_stream(source)
        return reader.schema.names, iter(reader)
    except pa.ArrowInvalid:
        source.seek(0)
        reader = pa.ipc.open_file(source)
        return reader.schema.names, map(reader.get_batch, range(reader.num_record_batches))


FIRST_READERS: dict[str, Callable[[Path], FirstRows | None]] = {
    ".jsonl": _first_lines, ".json": _first_of_json, ".csv": partial(_read_csv, limit=FIRST_ROWS),
    ".parquet": _first_of_table, ".arrow": _first_of_table,
}  # fmt: skip


def parse_source(name: str) -> tuple[str, str | None]:
    """Return the path and the split of `PATH[@split]`; an existing path may contain an @ itself."""
    if os.path.exists(os.path.expanduser(name)) or "@" not in name:
        return name, None
    path, _, split = name.rpartition("@")
    return path, split


def split_name(split: str) -> str:
    match = SPLIT_SLICE.fullmatch(split)
    return match["name"] if match else split


def files_of_split(path: Path, files: list[Path], split: str) -> list[Path]:
    """Select the files whose name or folder contains the split name; others are `train`."""
    wanted = _named_split([split_name(split)])
    by_split: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(path)).lower())
        by_split.setdefault(_named_split(words) or DEFAULT_SPLIT, []).append(file)
    if wanted not in by_split:
        raise ValueError(f"the directory {path} has the splits {sorted(by_split)}, got `@{split}`")
    return by_split[wanted]


def _named_split(words: list[str]) -> str | None:
    found = (name for name, form in SPLIT_NAMES.items() if any(re.fullmatch(form, word) for word in words))
    return next(found, None)
