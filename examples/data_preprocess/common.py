# SPDX-License-Identifier: Apache-2.0
"""Convert public data sets to parquet files for training: the command, and helpers for rows.

The rows are read twice: `survey` finds unusable and repeated rows, and `write_files` converts and writes the
rest. Only one row group is in memory at a time, and no file is created before all rows have been checked.
"""

import argparse
import hashlib
import random
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
from pyarrow import parquet
from rich.console import Console
from rich.progress import track

from verl.data.bad_rows import BadRowError
from verl.data.files import Row, Rows, load_rows
from verl.data.messages import references
from verl.utils.imports import deferred

# All columns of a converted file, in this order; columns that are empty in all rows are left out.
COLUMN_TYPES = {
    "problem": datasets.Value("string"),
    "answer": datasets.Value("string"),
    "images": datasets.List(datasets.Image()),
    "videos": datasets.List(datasets.Value("string")),
    "response": datasets.Value("string"),
    "solution": datasets.Value("string"),
    "level": datasets.Value("int64"),
    "subject": datasets.Value("string"),
    "choices": datasets.List(datasets.Value("string")),
    "duration": datasets.Value("string"),
    "domain": datasets.Value("string"),
    "sub_category": datasets.Value("string"),
    "task_type": datasets.Value("string"),
    "ability": datasets.Value("string"),
    "id": datasets.Value("string"),
    "data_source": datasets.Value("string"),
}
IMAGE_MARKER, VIDEO_MARKER = "<image>", "<video>"
TAGGED_ANSWER = re.compile(r"\s*<answer>(.*)</answer>\s*", re.DOTALL)
REPEATED = "the same problem and answer as an earlier row"
CONTRADICTING = "the same problem as an earlier row, with another answer"
VAL_FILE = "val.parquet"
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 1000, 64 * 2**20


@dataclass(frozen=True)
class DataSet:
    """A public data set and the conversion of its rows; `convert` raises BadRowError for an unusable row."""

    name: str
    summary: str
    convert: Callable[[Row], Row]
    hub_names: tuple[str, ...]  # the main one first
    columns: tuple[str, ...]  # required; `a|b` requires one of the two
    example: str  # the script in `examples/` that trains on it, or evaluates
    subset: str | None = None  # folder of the hub repository, if it has several
    is_benchmark: bool = False  # it is for evaluation only
    is_converted_by_example: bool = False  # which names the files itself

    def converted(self, row: Row, image_dir: str | None = None) -> Row:
        """Convert a row: images become bytes, columns without a value are left out."""
        row = {"data_source": self.hub_names[0]} | self.convert(row)
        for column in ("problem", "answer"):
            if not row[column].strip():
                raise BadRowError(f"the {column} is empty")
        if "images" in row:
            images = references(row["images"], "image", image_dir)
            row["images"] = [{"bytes": _bytes(image), "path": None} for image in images]
        return {column: value for column, value in row.items() if value is not None}


@dataclass
class Survey:
    """The usable rows of a data set, and the reasons why others are left out."""

    kept: list[int] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # first row with each reason

    def leave_out(self, reason: str, where: str) -> None:
        self.left_out[reason] += 1
        self.first.setdefault(reason, where)

    def __str__(self) -> str:
        if not self.left_out:
            return "all rows are used\n"
        lines = [
            f"  {count} {reason}; the first is {self.first[reason]}\n"
            for reason, count in self.left_out.most_common()
        ]
        return f"{self.left_out.total()} rows are left out:\n{''.join(lines)}"


def main(
    data_sets: Sequence[DataSet], description: str | None, arguments: Sequence[str] | None = None
) -> int:
    """Run the command for these data sets; the exit status is 1 if nothing was written."""
    parser = make_parser(data_sets, description)
    options = parser.parse_args(arguments)
    if options.list:
        sys.stdout.write("\n".join(map(_listing, data_sets)))
        return 0
    if not (options.dataset and options.input and options.output):
        parser.error("name the data set, `--input` and `--output`")
    (data_set,) = [one for one in data_sets if one.name == options.dataset]
    try:
        convert(data_set, options)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    return 0


def make_parser(data_sets: Sequence[DataSet], description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if len(data_sets) == 1:
        parser.set_defaults(dataset=data_sets[0].name)
    else:
        names = sorted(data_set.name for data_set in data_sets)
        parser.add_argument("dataset", nargs="?", choices=names, help="data set of the rows")
    parser.add_argument("--input", metavar="PATH[@split]", help="the rows: a file, a folder or a hub name")
    parser.add_argument("--output", type=Path, metavar="FILE.parquet", help="replaced if it exists")
    parser.add_argument("--val-rows", type=int, default=0, help=f"rows for {VAL_FILE} (default 0)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the validation rows (default 1)")
    parser.add_argument("--image-dir", metavar="DIR", help="base folder of relative image paths")
    parser.add_argument("--list", action="store_true", help="list data sets, their columns and examples")
    return parser


def convert(data_set: DataSet, options: argparse.Namespace) -> None:
    """Open, survey and write.

    Raises:
        ValueError: A file, a column or a switch is wrong, or no row is left.
        OSError: The input does not exist, or a file cannot be written.
    """
    if options.output.suffix != ".parquet":
        raise ValueError(f"`--output` must end in .parquet, got {options.output}")
    if options.val_rows < 0 or (options.val_rows and options.output.name == VAL_FILE):
        raise ValueError(
            f"`--val-rows` ({options.val_rows}) must be at least 0, and `--output` ({options.output}) another"
            f" file than {VAL_FILE}, which holds the rows for validation"
        )
    rows = open_rows(options.input, data_set)
    check_columns(rows, data_set)
    sys.stdout.write(f"reading {len(rows)} rows of {options.input}\n")
    found = survey(rows, data_set, options.image_dir)
    sys.stdout.write(str(found))
    files = split_rows(found.kept, options)
    write_files(files, found.columns, lambda index: data_set.converted(rows[index], options.image_dir))
    columns = ", ".join(column for column in COLUMN_TYPES if column in found.columns)
    for path, numbers in files.items():
        sys.stdout.write(f"wrote {path}: {len(numbers)} rows with {columns}\n")
    val = f"data.val_files={list(files)[-1]}"
    purpose, sources = ("train", f"data.train_files={options.output} {val}")
    if data_set.is_benchmark:
        purpose, sources = "evaluate", val
    options = "" if data_set.is_converted_by_example else f" {sources}"
    sys.stdout.write(f"to {purpose} on them: bash examples/{data_set.example}.sh{options}\n")


def open_rows(source: str, data_set: DataSet) -> Rows:
    """Open the input; from a hub repository with several subsets, use the one of this data set."""
    name, _, split = source.partition("@")
    if data_set.subset is not None and name in data_set.hub_names and not Path(name).exists():
        deferred("verl.models.auto", "use_modelscope_hub_if_asked")()
        try:
            folder = huggingface_hub.snapshot_download(
                name, repo_type="dataset", allow_patterns=f"{data_set.subset}/*"
            )
        except OSError as error:
            raise FileNotFoundError(
                f"`--input`: {name} is not a local file or directory, and the hub cannot be reached: {error}"
            ) from error
        source = f"{folder}/{data_set.subset}@{split or 'train'}"
    return load_rows(source, "--input")


def check_columns(rows: Rows, data_set: DataSet) -> None:
    for source in rows.sources:
        missing = [need for need in data_set.columns if not set(need.split("|")) & set(source.columns)]
        if missing:
            raise ValueError(
                f"`--input`: {source.name} has no column {_quoted(missing)}: {data_set.name} needs"
                f" {_quoted(data_set.columns)}, found {_quoted(source.columns)}; `--list` names the data"
                " sets and their columns"
            )


def survey(rows: Rows, data_set: DataSet, image_dir: str | None) -> Survey:
    """Check every row and find repeated problems by their text, images and videos."""
    found = Survey()
    answers: dict[bytes, str] = {}
    for index in _progress(range(len(rows))):
        try:
            row = data_set.converted(rows[index], image_dir)
        except BadRowError as error:
            found.leave_out(str(error), rows.where(index))
            continue
        digest = _digest(row)
        # Keep the first row of a problem even if a later answer differs: nothing shows which one is right.
        if digest in answers:
            reason = REPEATED if answers[digest] == row["answer"] else CONTRADICTING
            found.leave_out(reason, rows.where(index))
            continue
        answers[digest] = row["answer"]
        found.kept.append(index)
        found.columns |= row.keys()
    return found


def split_rows(kept: list[int], options: argparse.Namespace) -> dict[Path, list[int]]:
    """Split the row numbers into the files to write."""
    if not kept:
        raise ValueError(f"`--input`: none of the rows of {options.input} can be used as {options.dataset}")
    if len(kept) <= options.val_rows:
        raise ValueError(
            f"`--val-rows` ({options.val_rows}) must be less than the rows that can be used ({len(kept)})"
        )
    if not options.val_rows:
        return {options.output: kept}
    drawn = set(random.Random(options.seed).sample(kept, options.val_rows))
    return {
        options.output: [index for index in kept if index not in drawn],
        options.output.with_name(VAL_FILE): sorted(drawn),
    }


def write_files(
    files: Mapping[Path, Sequence[int]], columns: Container[str], convert: Callable[[int], Row]
) -> None:
    """Write the given rows to each file. No file is replaced before all are complete."""
    types = {column: kind for column, kind in COLUMN_TYPES.items() if column in columns}
    schema = datasets.Features(types).arrow_schema
    temporary = {path: path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp") for path in files}
    try:
        for path, numbers in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with parquet.ParquetWriter(temporary[path], schema) as writer:
                for group in _row_groups(map(convert, _progress(numbers))):
                    writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
        for path, written in temporary.items():
            written.replace(path)
    finally:
        for written in temporary.values():
            written.unlink(missing_ok=True)


# --- helpers for rows


def text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise BadRowError(f"`{column}` must be text, got {type(value).__name__}")
    return value


def single_message(prompt: Any) -> str:
    """Return a prompt that is text, or the only message of a chat."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or len(prompt) != 1 or prompt[0].get("role") != "user":
        raise BadRowError("the prompt is not one message of the user")
    return text(prompt[0], "content")


def either(row: Row, first: str, second: str) -> Any:
    """Return the first column that has a value."""
    value = row.get(first)
    return row.get(second) if value is None else value


def untagged_answer(row: Row) -> str:
    """Return column `answer` or `solution`, without the tags in `<answer> 3 </answer>`."""
    answer = either(row, "answer", "solution")
    answer = str(answer) if isinstance(answer, int) else text({"answer": answer}, "answer")
    tagged = TAGGED_ANSWER.fullmatch(answer)
    return (tagged[1] if tagged else answer).strip()


def with_images(row: Row, images: Any, answer: str) -> Row:
    """Return a row whose problem has one marker for each image; without any, the images come first."""
    images = [] if images is None else images if isinstance(images, list) else [images]
    problem = text(row, "problem")
    markers = problem.count(IMAGE_MARKER)
    if not images:
        raise BadRowError("the row has no image")
    if markers not in (0, len(images)):
        raise BadRowError(f"the problem has {markers} {IMAGE_MARKER} but the row has {len(images)} images")
    if markers == 0:
        problem = IMAGE_MARKER * len(images) + problem
    return {"problem": problem, "answer": answer, "images": images}


def _row_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
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
    for video in row.get("videos", []):  # by path: videos are not read here
        digest.update(hashlib.sha256(video.encode()).digest())
    return digest.digest()


def _listing(data_set: DataSet) -> str:
    files = "data.val_files=FILE" if data_set.is_benchmark else "data.train_files=FILE data.val_files=FILE"
    return (
        f"{data_set.name}: {data_set.summary}\n"
        f"  hub      {', '.join(data_set.hub_names)}\n"
        f"  columns  {', '.join(data_set.columns)}\n"
        f"  run      bash examples/{data_set.example}.sh {files}\n"
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _progress(numbers: Sequence[int]) -> Iterable[int]:
    console = Console(stderr=True)
    return track(numbers, "rows", console=console, transient=True, disable=not console.is_terminal)
