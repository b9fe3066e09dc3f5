# SPDX-License-Identifier: Apache-2.0
"""A look at the first rows of a run's files, which takes a fraction of a second and imports no torch.

It raises what opening the data would raise much later, with the same functions and words. Data sets on the
hub and pickles are left to that.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from verl.config.data import FILES, DataConfig, RowsConfig
from verl.config.files.model_files import processor_files, read_json
from verl.config.model import ModelConfig
from verl.config.sft import SFTDataConfig
from verl.data.bad_rows import BAD_ROW_REMEDY, BadRow, bad_rows_text
from verl.data.columns import (
    check_category_columns,
    check_conversation_columns,
    check_prompt_columns,
    notes_on_columns,
)
from verl.data.plain_files import (
    DEFAULT_SPLIT,
    FIRST_READERS,
    FirstRows,
    Row,
    Source,
    files_of_split,
    first_rows,
    named,
    no_rows,
    parse_source,
)
from verl.data.prompt_template import PromptFormat, no_chat_template, read_chat_template

TEMPLATE_FILES = ("chat_template*", "additional_chat_templates/*", "tekken.json")
MAX_FILES = 8  # of a folder
MAX_ROWS = 4  # that are returned, at least one of each file
AnyData = DataConfig | SFTDataConfig  # of prompts, or of conversations


class FirstLook(NamedTuple):
    """Sentences on what may be wrong, and some rows."""

    notes: list[str]
    rows: list[Row]


def look_at_data(data: AnyData, processor: str | None, *, checks_rows: bool = True) -> FirstLook:
    """Look at templates, columns and first rows of a run.

    Args:
        data: The section `data`.
        processor: Folder or hub name of the model's tokenizer and processor.
        checks_rows: Whether a bad row is an error, as in a run with `data.on_bad_row=error`.

    Raises:
        ValueError: The run could not use its data.
    """
    kinds = media_kinds(processor)
    check_columns = check_prompt_columns if isinstance(data, DataConfig) else check_conversation_columns
    if data.override_chat_template is not None:
        read_chat_template(data.override_chat_template)
    look = FirstLook([], [])
    if data.dataset is not None:  # a class of the user's reads the files, in whatever form they are
        return look
    with closing(PromptFormat(data.format_prompt)) as prompt_format:
        for name in FILES:
            option, seen = f"data.{name}", _first_rows(data, name)
            if not seen:
                continue
            sources = [each.source for each in seen]
            # Later rows may have columns that the first ones lack, if the file has no list of them.
            check_columns(option, sources, data)
            look.notes.extend(notes_on_columns(option, sources, data, prompt_format.names, kinds))
            if checks_rows and kinds is not None and data.on_bad_row == "error":
                _check_rows(option, seen, data, prompt_format, kinds)
            count = -(-MAX_ROWS // len(sources))
            look.rows.extend(row for source in sources for row in source.rows[:count])
            if not isinstance(data, DataConfig):
                continue
            if name == "val_files" and _are_whole(data.val_files, seen):
                check_category_columns(sources, data)
            if checks_rows and name == "train_files":
                _check_number(seen, data)
    return look


def check_chat_template(model: ModelConfig, override: str | None) -> None:
    """Raise a ValueError if the files of a model's tokenizer show that it has no chat template."""
    folder = Path(model.tokenizer_path or "")
    config = read_json(folder / "tokenizer_config.json")
    if config is None or "auto_map" in config or override is not None or model.is_pipeline:
        return
    files = [file for name in TEMPLATE_FILES for file in folder.glob(name)]
    if config.get("chat_template") is None and not files:
        raise no_chat_template(folder)


def prompts_of_batch(data: DataConfig) -> tuple[str, int]:
    """Return the option that says how many prompts a batch of the loader has, and their number."""
    name = "rollout_batch_size" if data.mini_rollout_batch_size is None else "mini_rollout_batch_size"
    return f"data.{name}", getattr(data, name)


def too_few_rows(option: str, batch_size: int, usable: int, found: str, data: RowsConfig) -> ValueError:
    """Return the error of a run whose rows do not fill a batch."""
    files = "data.sources" if data.files_by_source("train_files") else "data.train_files"
    return ValueError(
        f"`{option}` ({batch_size}) must be at most the number of usable training rows, got {usable}:"
        f" `{files}` has {found}"
    )


def _check_number(seen: Sequence[FirstRows], data: DataConfig) -> None:
    if _are_whole(data.train_files, seen):
        number, (option, size) = sum(len(each.source.rows) for each in seen), prompts_of_batch(data)
        if number < size:
            raise too_few_rows(option, size, number, f"{number} rows", data)


def _are_whole(option: str | Sequence[str], seen: Sequence[FirstRows]) -> bool:
    """Return whether each source of an option is a file that was read to its end."""
    names = [option] if isinstance(option, str) else option
    files = [name for name in names if os.path.isfile(os.path.expanduser(name.strip()))]
    return len(files) == len(names) == len(seen) and all(each.are_all for each in seen)


def media_kinds(folder: str | None) -> tuple[str, ...] | None:
    """Return the kinds of media that the model has a processor for; None if its files are not here."""
    if folder is None or not os.path.isdir(folder):
        return None
    files = [file.read_text() for file in processor_files(Path(folder))]
    if not files:
        return ()
    hears = any("feature_extractor" in text for text in files)
    return ("image", "video", "audio") if hears else ("image", "video")


def _first_rows(data: AnyData, name: str) -> list[FirstRows]:
    """Read the first rows of the files of an option; those of a mixture have the names of their sources."""
    mixed, found = data.files_by_source(name), []
    for source, files in mixed.items():
        for seen in first_of_sources(files, f"data.sources.{source}.{name}"):
            rows = [row | {data.source_key: source} for row in seen.source.rows]
            columns = named(seen.source, data.source_key).columns
            found.append(seen._replace(source=Source(seen.source.name, rows, columns)))
    return found if mixed else first_of_sources(getattr(data, name), f"data.{name}")


def first_of_sources(files: str | Sequence[str], option: str) -> list[FirstRows]:
    """Read the first rows of each local file; a ValueError names the option."""
    names = [name.strip() for name in ([files] if isinstance(files, str) else files) if name.strip()]
    try:
        paths = [_local_files(name) for name in names]
        looked = [seen for found in paths for path in found if (seen := first_rows(path)) is not None]
    except ValueError as error:
        raise ValueError(f"`{option}`: {error}") from error
    with_rows = [seen for seen in looked if seen.source.rows]
    if names and all(paths) and not with_rows and len(looked) == sum(map(len, paths)):
        raise no_rows(option, names)
    return with_rows


def _local_files(name: str) -> list[Path]:
    """Return the files of a source; none for a part of one, a data set saved to disk, or one of the hub."""
    source, split = parse_source(name)
    path = Path(os.path.expanduser(source))
    if split is not None and "[" in split:  # which may leave the first rows out
        return []
    if path.is_file():
        return [path]
    if not path.is_dir() or (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return []
    found = sorted(file for file in path.rglob("*") if file.suffix in FIRST_READERS and file.is_file())
    return files_of_split(path, found, split or DEFAULT_SPLIT)[:MAX_FILES] if found else []


def _check_rows(
    option: str, seen: Sequence[FirstRows], data: AnyData, prompt_format: PromptFormat, kinds: tuple[str, ...]
) -> None:
    """Raise a ValueError that lists the rows that cannot be used."""
    from verl.data import messages  # noqa: PLC0415 (Pillow: a run without files has no need of it)
    from verl.data.media.references import content_id, is_url, payload  # noqa: PLC0415

    bad, looked = [], 0

    def check(row: Row) -> None:
        if isinstance(data, DataConfig):
            chat = messages.prompt_of(row, data, prompt_format, kinds)
        else:
            chat = messages.conversation_of(row, data, prompt_format, kinds)
        for noun, refs in (messages.media_of(row, chat, data, kinds) or {}).items():
            for ref in refs:
                if isinstance(source := payload(ref), str) and not is_url(source):
                    content_id(noun.removesuffix("s"), ref)

    for source, _ in seen:
        for number, row in enumerate(source.rows):
            try:
                check(row)
            except ValueError as error:
                bad.append(BadRow(looked, f"{source.name}, row {number}", str(error)))
            looked += 1
    if bad:
        text = bad_rows_text(option, bad, None if all(each.are_all for each in seen) else looked)
        raise ValueError(text + BAD_ROW_REMEDY)
