# SPDX-License-Identifier: Apache-2.0
"""Columns of a data file that a run needs, and columns that it should read: rules about names and values.

A run, a dry run and `data_check` all say it in these words, before torch is imported and again when the whole
data are opened. To know another kind of media, add it to `KINDS`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from verl.data.bad_rows import BadRowError
from verl.data.plain_files import Source

SAMPLED_ROWS = 64  # of a file, to see what its columns hold
MAX_PATH = 4096  # characters; a longer text is not a path
SIGNATURE = 12  # bytes at the start of a file that tell its kind


@dataclass(frozen=True)
class Kind:
    """A kind of media, and how a column of it is recognized."""

    noun: str  # its name in rows
    key: str  # the option that names its column
    names: re.Pattern[str]  # of a column whose values are references, whatever they look like
    suffixes: tuple[str, ...]
    signatures: tuple[tuple[int, bytes], ...]  # offset in the file and bytes

    @property
    def name(self) -> str:
        return self.noun.removesuffix("s")


def _named(words: str) -> re.Pattern[str]:
    return re.compile(rf"(.*_)?({words})(_?\d+|_bytes|_paths?|_files?|_urls?)?", re.IGNORECASE)


# A file that begins like an image is none of the others, so the order matters.
KINDS = (
    Kind(
        "images", "image_key", _named("images?|imgs?|pictures?|photos?"),
        (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".avif"),
        (
            (0, b"\x89PNG"), (0, b"\xff\xd8\xff"), (0, b"GIF8"), (0, b"BM"), (0, b"II*\0"), (0, b"MM\0*"),
            (8, b"WEBP"), (4, b"ftypavif"), (4, b"ftyphei"),
        ),
    ),
    Kind(
        "videos", "video_key", _named("videos?"), (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg"),
        ((4, b"ftyp"), (0, b"\x1aE\xdf\xa3"), (8, b"AVI ")),
    ),
    Kind(
        "audios", "audio_key", _named("audios?"), (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a"),
        ((8, b"WAVE"), (0, b"fLaC"), (0, b"OggS"), (0, b"ID3")),
    ),
)  # fmt: skip

# Usual names of a column, the likeliest first, for a key that names no column of the file.
USUAL_NAMES = {
    "prompt_key": (
        "prompt", "problem", "question", "query", "instruction", "input", "messages", "conversations", "text",
    ),
    "answer_key": (
        "answer", "ground_truth", "solution", "final_answer", "answers", "label", "target", "gold", "output",
        "response", "reward_model",
    ),
    "messages_key": ("messages", "conversations", "conversation", "chat", "dialog"),
    "response_key": ("response", "completion", "output", "answer", "solution", "chosen"),
}  # fmt: skip


def check_prompt_columns(option: str, sources: Iterable[Source], config: Any) -> None:
    """Raise a ValueError unless each file has the columns of prompts and answers."""
    for source in sources:
        missing = [] if config.prompt_key in source.columns else ["prompt_key"]
        if not {config.answer_key, config.answer_key.partition(".")[0]} & set(source.columns):
            missing.append("answer_key")
        if not missing:
            continue
        likely = likely_columns(missing, source.columns, config)
        absent = "` and no column `".join(getattr(config, key) for key in missing)
        remedy = " and ".join(
            f"`data.{key}={likely[key]}`" if key in likely else f"`data.{key}` to one of them"
            for key in missing
        )
        raise ValueError(
            f"`{option}`: {source.name} has no column `{absent}`: it has {source.columns}; set {remedy}"
        )


def answer_of(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of one inside of a column: `reward_model.ground_truth`."""
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            found = sorted(value) if isinstance(value, Mapping) else f"{value!r:.80}"
            raise BadRowError(f"`{key}` (`data.answer_key`) has no `{name}` in it; there is {found}")
        value = value[name]
    return value


def check_category_columns(sources: Sequence[Source], config: Any) -> None:
    """Raise a ValueError unless each column of `data.category_keys` is in a file of `data.val_files`."""
    not_kept = {config.prompt_key, config.image_key, config.video_key, config.audio_key}
    known = sorted({column for source in sources for column in source.columns} - not_kept)
    missing = [key for key in config.category_keys if key not in known]
    if missing:
        raise ValueError(
            f"`data.category_keys` (`--by` of verl-eval): `{'`, `'.join(missing)}` cannot be a column of"
            f" categories: besides prompts and media, `data.val_files` have the columns {known}"
        )


def check_conversation_columns(option: str, sources: Sequence[Source], config: Any) -> None:
    """Raise a ValueError unless each file has conversations, or prompts and responses."""
    for source in sources:
        alternatives = [{config.messages_key}, {config.prompt_key, config.response_key}]
        if not any(columns <= set(source.columns) for columns in alternatives):
            raise ValueError(
                f"`{option}`: {source.name} has neither a column `{config.messages_key}` nor"
                f" `{config.prompt_key}` and `{config.response_key}`: it has {source.columns}; set"
                f" {_conversation_remedy(source.columns, config)}"
            )
    if config.format_prompt and all(config.messages_key in source.columns for source in sources):
        raise ValueError(
            f"`data.format_prompt` ({config.format_prompt}) has no effect on `{option}`, whose rows are"
            " conversations: leave it out, or give rows of prompt and response"
        )


def _conversation_remedy(columns: Collection[str], config: Any) -> str:
    likely = likely_columns(("messages_key", "prompt_key", "response_key"), columns, config)
    lacking = [key for key in ("prompt_key", "response_key") if getattr(config, key) not in columns]
    if "messages_key" in likely:
        return f"`data.messages_key={likely['messages_key']}`"
    if all(key in likely for key in lacking):
        return " and ".join(f"`data.{key}={likely[key]}`" for key in lacking)
    return "`data.messages_key`, or `data.prompt_key` and `data.response_key`, to some of them"


def likely_columns(keys: Iterable[str], columns: Collection[str], config: Any) -> dict[str, str]:
    """Return for each key that names no column one that was probably meant, if there is one."""
    lower = {column.lower(): column for column in columns}
    used = {getattr(config, key, None) for key in USUAL_NAMES}
    found: dict[str, str] = {}
    for key in keys:
        names = (lower[name] for name in USUAL_NAMES[key] if name in lower)
        name = next((name for name in names if name not in used), None)
        if name is not None:
            found[key] = name
            used.add(name)
    return found


def notes_on_columns(
    option: str,
    sources: Iterable[Source],
    config: Any,
    template_names: Collection[str],
    kinds: Collection[str] | None,
) -> list[str]:
    """Say which columns of the files hold media that nothing reads.

    Args:
        config: The `data` section of a run.
        template_names: Names that the prompt template reads.
        kinds: The kinds of media that the model reads; None if that is not known yet.

    Raises:
        ValueError: The model reads media, and no option names the column that has them.
    """
    keys = ("prompt_key", "answer_key", "messages_key", "response_key")
    read = {getattr(config, key) for key in keys if hasattr(config, key)} | set(template_names)
    notes = [note for source in sources for note in _unread_media(option, source, config, read, kinds)]
    if errors := [text for text, is_error in notes if is_error]:
        raise ValueError("\n".join(errors))
    return [text for text, _ in notes]


def _unread_media(
    option: str, source: Source, config: Any, read: Collection[str], kinds: Collection[str] | None
) -> Iterator[tuple[str, bool]]:
    """Yield sentences on such columns, and whether the rows cannot have been meant so."""
    rows = []
    for index in range(min(SAMPLED_ROWS, len(source.rows))):
        with suppress(BadRowError):
            rows.append(source.row(index))
    readable = [kind for kind in KINDS if kinds is None or kind.name in kinds] or KINDS[:2]
    named = {kind.key: getattr(config, kind.key) for kind in readable}
    is_any_read = any(not _is_empty(row.get(column)) for row in rows for column in named.values())
    for kind in KINDS:
        names = [
            column
            for column in source.columns
            if column not in read and column not in named.values() and holds(kind, column, rows)
        ]
        if is_any_read:  # then a path is more likely to be kept for the record
            names = [name for name in names if not _is_text(rows, name) or kind.names.fullmatch(name)]
        if names:
            is_readable = kinds is None or kind.name in kinds
            text = _unread_text(option, source.name, kind, names, named if is_readable else None)
            lacks_key = is_readable and named[kind.key] not in source.columns
            yield text, bool(kinds) and lacks_key and not is_any_read


def _unread_text(
    option: str,
    file: str,
    kind: Kind,
    names: Sequence[str],
    named: Mapping[str, str] | None,  # None if the model cannot read it
) -> str:
    columns = ", ".join(f"`{name}`" for name in names)
    noun = "audio" if kind.name == "audio" else kind.noun
    text = f"`{option}`: {file} has the column{'s' if len(names) > 1 else ''} {columns} of {noun}, which"
    if named is None:
        return f"{text} the model cannot read: it learns without them"
    if len(names) == 1:
        return f"{text} no option reads: set `data.{kind.key}={names[0]}` (it is `{named[kind.key]}` now)"
    return (
        f"{text} no option reads: set `data.{kind.key}` (`{named[kind.key]}` now) to one of them, or put the"
        f" {noun} of a row into one column, as a list"
    )


def media_column(noun: str, row: Mapping[str, Any], read: Collection[str]) -> str | None:
    """Return another column of the row that holds such media (`images`, `videos`, `audios`)."""
    (kind,) = (kind for kind in KINDS if kind.noun == noun)
    return next((column for column in row if column not in read and holds(kind, column, [row])), None)


def holds(kind: Kind, column: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all values of a column that are not empty are media of this kind."""
    values = [row[column] for row in rows if not _is_empty(row.get(column))]
    is_named = kind.names.fullmatch(column) is not None
    return bool(values) and all(_is_media(kind, value, is_named) for value in values)


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


def _is_text(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    return all(isinstance(row.get(column), str | None) for row in rows)


def _is_media(kind: Kind, value: Any, is_named: bool) -> bool:
    if isinstance(value, list | tuple):
        return all(map(partial(_is_media, kind, is_named=is_named), value))
    if isinstance(value, dict):
        # Only a reference to one file has these keys: `{"bytes": ..., "path": ...}`, `{"image": "a.png"}`.
        content = value.get("bytes") or value.get("path") or value.get(kind.name)
        return content is not None and _is_media(kind, content, is_named)
    if isinstance(value, bytes | bytearray | memoryview):
        return _kind_of_bytes(bytes(value[:SIGNATURE])) is kind
    if isinstance(value, str):
        return _is_path(kind, value, is_named)
    return kind is KINDS[0] and type(value).__module__.startswith("PIL.")


def _kind_of_bytes(start: bytes) -> Kind | None:
    known = ((kind, at, mark) for kind in KINDS for at, mark in kind.signatures)
    return next((kind for kind, at, mark in known if start[at:].startswith(mark)), None)


def _is_path(kind: Kind, text: str, is_named: bool) -> bool:
    if len(text) > MAX_PATH:
        return text.startswith(f"data:{kind.name}/")
    if "\n" in text:
        return False
    path = text
    if "://" in text:
        try:
            path = urlsplit(text).path
        except ValueError:  # brackets that are no address
            return False
    if path.lower().endswith(kind.suffixes):
        return True
    others = tuple(suffix for other in KINDS if other is not kind for suffix in other.suffixes)
    return is_named and " " not in text and not path.lower().endswith(others)
