# SPDX-License-Identifier: Apache-2.0
"""Convert a public data set to a parquet file that a run reads.

    python3 scripts/convert_data.py gsm8k --input openai/gsm8k@train --output data/gsm8k/train.parquet

`--input` is what `data.train_files` takes: a file, a folder or a data set on the hub, each with `@split`.
With `--val-rows 200`, 200 rows drawn by `--seed` go to `val.parquet` beside the output instead. Rows that
cannot be used and those that repeat a problem are left out and counted. `--list` names the data sets.
"""

import argparse
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import huggingface_hub
from rich.console import Console
from rich.progress import track

from verl.cli.convert_data.conversion import Survey, check_columns, convert_row, survey, write_files
from verl.cli.convert_data.converters import COLUMN_TYPES, CONVERTERS, Converter
from verl.data.files import Rows, load_rows, use_modelscope_hub_if_asked

VAL_FILE = "val.parquet"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 where nothing was written.

    Raises:
        SystemExit: An unknown switch or data set, with status 2, or `--help`.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.list:
        sys.stdout.write(listing())
        return 0
    if not (options.dataset and options.input and options.output):
        parser.error("name the data set, `--input` and `--output`")
    try:
        convert(options)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"convert_data: {error}\n")
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's own switches."""
    parser = argparse.ArgumentParser(
        prog="convert_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", nargs="?", choices=CONVERTERS.names(), help="whose rows they are")
    parser.add_argument("--input", metavar="PATH[@split]", help="the rows: a file, a folder or a hub name")
    parser.add_argument("--output", type=Path, metavar="FILE.parquet", help="replaced if it is there")
    parser.add_argument("--val-rows", type=int, default=0, help=f"rows for {VAL_FILE} (default 0)")
    parser.add_argument("--seed", type=int, default=1, help="of the rows for validation (default 1)")
    parser.add_argument("--image-dir", metavar="DIR", help="where relative paths of images start")
    parser.add_argument("--list", action="store_true", help="the data sets, their columns and examples")
    return parser


def listing() -> str:
    """Every data set: name, what it is, hub names, columns needed, the run that it is for."""
    entries = []
    for name in CONVERTERS:
        converter = CONVERTERS[name]
        entries.append(
            f"{name}: {converter.summary}\n"
            f"  hub      {', '.join(converter.hub_names)}\n"
            f"  columns  {', '.join(converter.columns)}\n"
            f"  run      bash examples/{converter.example}.sh data.train_files=FILE data.val_files=FILE\n"
        )
    return "\n".join(entries)


def convert(options: argparse.Namespace) -> None:
    """Read, survey and write.

    Raises:
        ValueError: A file, a column or a switch is wrong, or no row is left.
        OSError: The input is not there, or a file cannot be written.
    """
    converter = CONVERTERS[options.dataset]
    if options.output.suffix != ".parquet":
        raise ValueError(f"`--output` must end in .parquet, got {options.output}")
    if options.val_rows < 0 or (options.val_rows and options.output.name == VAL_FILE):
        raise ValueError(
            f"`--val-rows` ({options.val_rows}) must be at least 0, and `--output` ({options.output}) another"
            f" file than {VAL_FILE}, which holds the rows for validation"
        )
    rows = open_rows(options.input, converter)
    check_columns(rows, options.dataset, converter)
    sys.stdout.write(f"reading {len(rows)} rows of {options.input}\n")
    found = survey(rows, converter, options.image_dir, _progress)
    sys.stdout.write(left_out_text(found))
    files = divide(found.kept, options)
    write_files(
        files, found.columns, lambda index: convert_row(rows[index], converter, options.image_dir), _progress
    )
    columns = ", ".join(column for column in COLUMN_TYPES if column in found.columns)
    for path, numbers in files.items():
        sys.stdout.write(f"wrote {path}: {len(numbers)} rows with {columns}\n")
    sources = f"data.train_files={options.output} data.val_files={list(files)[-1]}"
    sys.stdout.write(f"to train on them: bash examples/{converter.example}.sh {sources}\n")


def open_rows(source: str, converter: Converter) -> Rows:
    """Open the input; of a hub's data set with several subsets, the one that the converter means.

    Raises:
        ValueError: A file cannot be read.
        OSError: It is not there, or the hub cannot be reached.
    """
    name, _, split = source.partition("@")
    if converter.subset is not None and name in converter.hub_names and not Path(name).exists():
        use_modelscope_hub_if_asked()
        try:
            folder = huggingface_hub.snapshot_download(
                name, repo_type="dataset", allow_patterns=f"{converter.subset}/*"
            )
        except OSError as error:
            raise FileNotFoundError(
                f"`--input`: {name} is no local file or directory, and the hub cannot be reached: {error}"
            ) from error
        source = f"{folder}/{converter.subset}@{split or 'train'}"
    return load_rows(source, "--input")


def left_out_text(found: Survey) -> str:
    """How many rows are left out, why, and where the first of each kind stands."""
    if not found.left_out:
        return "every row is used\n"
    lines = [
        f"  {count} {reason}; the first is {found.first[reason]}\n"
        for reason, count in found.left_out.most_common()
    ]
    return f"{found.left_out.total()} rows are left out:\n{''.join(lines)}"


def divide(kept: list[int], options: argparse.Namespace) -> dict[Path, list[int]]:
    """The rows of each file.

    Raises:
        ValueError: None is left for training.
    """
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


def _progress(numbers: Sequence[int]) -> Iterable[int]:
    console = Console(stderr=True)
    return track(numbers, "rows", console=console, transient=True, disable=not console.is_terminal)
