# SPDX-License-Identifier: Apache-2.0
"""From the rows of a public data set to parquet files that a run reads.

The rows are read twice: `survey` converts each and finds those that cannot be used or repeat an earlier one,
`write_files` converts those that are left and writes them. So no more than one row group is in memory, and no
file appears before all rows were seen.
"""

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import pyarrow
from pyarrow import parquet

from verl.cli.convert_data.converters import COLUMN_TYPES, Converter
from verl.data.bad_rows import BadRowError
from verl.data.files import Row, Rows
from verl.data.messages import references

REPEATED = "the same problem and answer as an earlier row"
CONTRADICTING = "the same problem as an earlier row, with another answer"
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 1000, 64 * 2**20  # of a parquet file: what is in memory at once
Progress = Callable[[Sequence[int]], Iterable[int]]


@dataclass
class Survey:
    """What a data set holds.

    Attributes:
        kept: Numbers of the rows that are used, in order.
        columns: Columns that any of them has.
        left_out: Why rows are left out, and how many for each reason.
        first: The first row of each reason, as `file, row number`.
    """

    kept: list[int] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def leave_out(self, reason: str, where: str) -> None:
        """Count a row that is not used."""
        self.left_out[reason] += 1
        self.first.setdefault(reason, where)


def check_columns(rows: Rows, name: str, converter: Converter) -> None:
    """Compare the columns of each source with those that a converter needs.

    Raises:
        ValueError: One is missing; names found, needed and what else may be meant.
    """
    for source in rows.sources:
        missing = [need for need in converter.columns if not set(need.split("|")) & set(source.columns)]
        if missing:
            raise ValueError(
                f"`--input`: {source.name} has no column {_listed(missing)}: {name} needs"
                f" {_listed(converter.columns)}, found {_listed(source.columns)}; `--list` names the data"
                " sets and their columns"
            )


def convert_row(row: Row, converter: Converter, image_dir: str | None) -> Row:
    """Convert a row, with its images as bytes.

    Args:
        row: Of the data set.
        converter: Of the data set.
        image_dir: Relative paths of images start here; None is the working directory.

    Raises:
        BadRowError: It cannot be used.
    """
    converted = converter(row)
    if "images" not in converted:
        return converted
    images = references(converted["images"], "image", image_dir)
    return converted | {"images": [{"bytes": _bytes(image), "path": None} for image in images]}


def survey(rows: Rows, converter: Converter, image_dir: str | None, progress: Progress = iter) -> Survey:
    """Look at every row.

    A problem is known again by its text, its images and its videos. The first row with it stays; a later one
    is left out even if its answer differs, for nothing tells which of the two is right.

    Args:
        rows: Of the data set.
        converter: Of the data set.
        image_dir: See `convert_row`.
        progress: Goes through the numbers of the rows, and shows how far.
    """
    found = Survey()
    answers: dict[bytes, str] = {}
    for index in progress(range(len(rows))):
        try:
            row = convert_row(rows[index], converter, image_dir)
        except BadRowError as error:
            found.leave_out(str(error), rows.where(index))
            continue
        digest = _digest(row)
        if digest in answers:
            reason = REPEATED if answers[digest] == row["answer"] else CONTRADICTING
            found.leave_out(reason, rows.where(index))
            continue
        answers[digest] = row["answer"]
        found.kept.append(index)
        found.columns |= row.keys()
    return found


def write_files(
    files: Mapping[Path, Sequence[int]],
    columns: Container[str],
    convert: Callable[[int], Row],
    progress: Progress = iter,
) -> None:
    """Write parquet files. Those that were there are replaced, and none before all are complete.

    Args:
        files: The numbers of the rows of each file.
        columns: Those that the files have, of `COLUMN_TYPES`.
        convert: A row by its number.
        progress: Goes through the numbers of the rows, and shows how far.

    Raises:
        OSError: A file cannot be written, or not replaced; no part of one is left.
    """
    types = {column: kind for column, kind in COLUMN_TYPES.items() if column in columns}
    schema = datasets.Features(types).arrow_schema
    temporary = {path: path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp") for path in files}
    try:
        for path, numbers in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(temporary[path], schema, map(convert, progress(numbers)))
        for path, written in temporary.items():
            written.replace(path)
    finally:
        for written in temporary.values():
            written.unlink(missing_ok=True)


def _write(path: Path, schema: pyarrow.Schema, rows: Iterable[Row]) -> None:
    with parquet.ParquetWriter(path, schema) as writer:
        for group in _row_groups(rows):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


def _row_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows together up to a number, or up to the size of their images."""
    group, size = [], 0
    for row in rows:
        group.append(row)
        size += sum(len(image["bytes"]) for image in row.get("images", []))
        if len(group) == ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _bytes(image: str | bytes) -> bytes:
    if isinstance(image, bytes):
        return image
    try:
        return Path(image).read_bytes()
    except OSError as error:
        raise BadRowError(f"an image cannot be read: {error.strerror}") from error


def _digest(row: Row) -> bytes:
    digest = hashlib.sha256(row["problem"].encode())
    for image in row.get("images", []):
        digest.update(hashlib.sha256(image["bytes"]).digest())
    for video in row.get("videos", []):  # a path, for they are not read here
        digest.update(hashlib.sha256(video.encode()).digest())
    return digest.digest()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
