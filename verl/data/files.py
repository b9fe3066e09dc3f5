# SPDX-License-Identifier: Apache-2.0
"""Data rows from files, directories and the hub, as one list-like object.

A source is `PATH[@split]`: a file (`.parquet`, `.arrow`, `.json`, `.jsonl`, `.csv`, `.pkl`), a directory of
such files, a directory written by `Dataset.save_to_disk`, or a data set on the hub (`owner/name`,
`owner/name/subset` or `owner/name:subset`). `split` is a name such as `train` with an optional slice
(`train[:10%]`). Sources of different kinds and columns can be joined. To add a kind of file, add a reader to
`READERS`.
"""

import os
import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.exceptions import DatasetsError

from verl.data.mapped_lines import read_lines
from verl.data.plain_files import (
    DEFAULT_SPLIT,
    Row,
    Source,
    arrow_batches,
    files_of_split,
    from_object,
    named,
    no_rows,
    parse_source,
    read_csv,
    read_json,
    split_name,
    unreadable,
)
from verl.utils.processes.child_process import ChildEndedError, limit_memory
from verl.utils.processes.isolated_calls import IsolatedCalls

# Limits of what a Parquet or Arrow file becomes when decoded: two kilobytes can become a terabyte.
FREE_BYTES, MAX_RATIO = 1 << 30, 100  # a file may become 1 GiB and 100 times its size
MEMORY = 4 << 30  # bytes that decoding a batch may take; a value has at most 2 GiB
BATCH_BYTES, BATCH_ROWS = 32 << 20, 128
VALUE_BYTES = 4  # at least, of a decoded value


class Rows:
    """The rows of all files, concatenated; in a mixture, `column` has the name that `mixed` gives a file."""

    def __init__(self, sources: list[Source], mixed: Sequence[str] = (), column: str = "") -> None:
        self.sources, self.mixed, self.column = sources, mixed, column
        self.starts = list(accumulate((len(source.rows) for source in sources), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Row:
        """Return a row; a BadRowError names the column of a value that Python cannot hold."""
        number, offset = self._locate(index)
        row = self.sources[number].row(offset)
        return row | {self.column: self.mixed[number]} if self.mixed else row

    def by_source(self) -> dict[str, range]:
        """Return the numbers of the rows of each source of a mixture; {} without one."""
        ranges: dict[str, range] = {}
        for name, start, end in zip(self.mixed, self.starts, self.starts[1:], strict=False):
            ranges[name] = range(ranges[name].start if name in ranges else start, end)
        return ranges

    def where(self, index: int) -> str:
        """Return `FILE, row NUMBER`, counted from 0 within the file."""
        number, offset = self._locate(index)
        return f"{self.sources[number].name}, row {offset}"

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of a row's file, and its number in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        position = bisect_right(self.starts, index) - 1
        return position, index - self.starts[position]


def load_rows(files: str | Sequence[str], option: str = "data.train_files") -> Rows:
    """Open one or several sources; tables stay on disk, memory-mapped. Errors name the `option`."""
    names = [name.strip() for name in ([files] if isinstance(files, str) else files) if name.strip()]
    if not names:
        raise ValueError(f"`{option}` names no file: give one path, or a list of paths")
    try:
        rows = Rows([source for name in names for source in _open(name)])
    except (FileNotFoundError, ValueError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"`{option}`: {error}") from error
    if not len(rows):
        raise no_rows(option, names)
    return rows


def load_mixture(files: Mapping[str, str | Sequence[str]], column: str, option: str) -> Rows:
    """Open the files of each source of a mixture, whose rows get its name in a column of their own."""
    sources, mixed = [], []
    for name, own in files.items():
        found = load_rows(own, f"data.sources.{name}.{option}").sources
        sources += [named(source, column) for source in found]
        mixed += [name] * len(found)
    return Rows(sources, mixed, column)


def _open(name: str) -> list[Source]:
    path, split = parse_source(name)
    local = Path(os.path.expanduser(path))
    if os.path.isfile(local):
        return [_open_file(local, split)]
    if os.path.isdir(local):
        return _open_directory(local, split)
    if local.suffix in READERS or path.count("/") > 2 or path.startswith((".", "/", "~")):
        raise FileNotFoundError(f"no file or directory {path}")
    return [_open_hub(path, split or DEFAULT_SPLIT)]


def _open_file(path: Path, split: str | None) -> Source:
    if path.suffix not in READERS:
        raise ValueError(f"{path} must end in one of {sorted(READERS)}")
    if split is not None and split_name(split) != DEFAULT_SPLIT:
        raise ValueError(f"{path} is one file and has the split `train` only, got `@{split}`")
    try:
        source = READERS[path.suffix](path)
    except Exception as error:  # the readers of four formats raise many types
        raise unreadable(path, error) from error
    return _sliced(source, split)


def _open_directory(path: Path, split: str | None) -> list[Source]:
    if (path / "dataset_dict.json").is_file():
        splits = datasets.DatasetDict.load_from_disk(str(path))
        name = split_name(split or DEFAULT_SPLIT)
        if name not in splits:
            raise ValueError(f"{path} has the splits {sorted(splits)}, got `@{split or DEFAULT_SPLIT}`")
        return [_sliced(_table(f"{path}@{name}", splits[name]), split)]
    if (path / "state.json").is_file():
        return [_sliced(_table(str(path), datasets.Dataset.load_from_disk(str(path))), split)]

    found = sorted(file for file in path.rglob("*") if file.suffix in READERS and file.is_file())
    if not found:
        raise ValueError(f"the directory {path} has no file that ends in one of {sorted(READERS)}")
    pickled = next((file for file in found if file.suffix == ".pkl"), None)
    if pickled is not None:
        raise ValueError(
            f"the directory {path} has the pickle {pickled}, which may run any code when it is opened: name"
            " the file itself if you trust it, else remove it"
        )
    files = files_of_split(path, found, split or DEFAULT_SPLIT)
    if split is not None and "[" in split and len(files) > 1:
        raise ValueError(f"a slice (`@{split}`) needs a single file, {path} has {len(files)}")
    return [_sliced(_open_file(file, None), split) for file in files]


def _open_hub(path: str, split: str) -> Source:
    import_module("verl.models.auto").use_modelscope_hub_if_asked()  # files need no transformers
    name, colon, subset = path.partition(":")
    if not colon:
        name, subset = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:])
    try:
        return _table(f"{path}@{split}", datasets.load_dataset(name, subset or None, split=split))
    except (OSError, ValueError, DatasetsError) as error:
        subsets = _subsets(name) if isinstance(error, ValueError) else []
        if len(subsets) > 1 and subset not in subsets:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{path}: {reason} {name} has the subsets {subsets}: write one as `{name}/SUBSET@{split}`"
            ) from error
        text = f"{path} is no local file or directory, and the hub has no such data set or cannot be reached"
        raise FileNotFoundError(f"{text}: {error}") from error


def _subsets(name: str) -> list[str]:
    try:
        return datasets.get_dataset_config_names(name)
    except (OSError, ValueError, DatasetsError):
        return []


def _sliced(source: Source, split: str | None) -> Source:
    """Apply the slice of a split such as `train[:5%]` to the whole split."""
    if split is None or "[" not in split:
        return source
    name = split_name(split)
    (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(source.rows)})
    start, stop = part.from_ or 0, len(source.rows) if part.to is None else part.to
    is_table = isinstance(source.rows, datasets.Dataset)
    rows = source.rows.select(range(start, stop)) if is_table else source.rows[start:stop]
    return Source(f"{source.name}@{split}", rows, source.columns)


def _table(name: str, table: datasets.Dataset) -> Source:
    # Media columns return bytes or paths instead of decoded pixels.
    for column, feature in table.features.items():
        if (undecoded := _undecoded(feature)) is not feature:
            table = table.cast_column(column, undecoded)
    return Source(name, table, table.column_names)


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image | datasets.Video):
        return type(feature)(decode=False)
    inner = getattr(feature, "feature", None)
    if isinstance(feature, datasets.List) and _undecoded(inner) is not inner:
        return datasets.List(_undecoded(inner))
    return feature


def _read_table(path: Path) -> Source:
    builder = datasets.load_dataset_builder(path.suffix.removeprefix("."), data_files=str(path))
    if not os.path.isdir(builder.cache_dir):  # else it was decoded before
        _check_decoded_size(path)
        builder.download_and_prepare()
    table = builder.as_dataset(split=DEFAULT_SPLIT)
    assert isinstance(table, datasets.Dataset)  # not a dictionary of all splits
    return _table(str(path), table)


def _check_decoded_size(path: Path) -> None:
    """Raise a ValueError if the table is damaged or becomes too large."""
    limit = FREE_BYTES + MAX_RATIO * path.stat().st_size
    # In a process with limited memory, as the sizes in the file may be wrong.
    with closing(IsolatedCalls(partial(_is_within, limit), None, partial(limit_memory, MEMORY))) as calls:
        try:
            is_within = calls(path)
        except ChildEndedError:
            is_within = False
    if not is_within:
        raise ValueError(
            f"it becomes more than {limit >> 20} MiB when decoded, the limit for a file of its size (1 GiB"
            f" and {MAX_RATIO} times the file): if you need its rows, write them to several files"
        )


def _is_within(limit: int, path: Path) -> bool:
    total = 0
    try:
        for size in _decoded_sizes(path):
            total += size
            if total > limit:
                return False
    except (pa.ArrowMemoryError, MemoryError):
        return False
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error
    return True


def _decoded_sizes(path: Path) -> Iterator[int]:
    if path.suffix == ".arrow":
        yield from (batch.nbytes for batch in arrow_batches(path)[1])
        return
    with pq.ParquetFile(path, memory_map=True) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(group.num_columns)]
        yield VALUE_BYTES * sum(column.num_values for column in columns)
        row = sum(column.total_uncompressed_size for column in columns) // max(1, file.metadata.num_rows)
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row)))
        yield from (batch.nbytes for batch in file.iter_batches(batch_size=rows, use_threads=False))


def _read_pickle(path: Path) -> Source:
    with path.open("rb") as file:
        # A pickle can run code when it is opened: the documentation says to load trusted files only.
        content = pickle.load(file)
    if isinstance(content, pandas.DataFrame):
        content = content.to_dict("records")
    return from_object(path, content)


READERS: dict[str, Callable[[Path], Source]] = {
    ".parquet": _read_table, ".arrow": _read_table, ".jsonl": read_lines, ".json": read_json,
    ".csv": read_csv, ".pkl": _read_pickle,
}  # fmt: skip
