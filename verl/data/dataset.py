# SPDX-License-Identifier: Apache-2.0
"""Base class of data sets: open files, check every row once, read rows with their media by reference.

`RowDataset` leaves out (or refuses) rows that cannot be used. It keeps no pixels: a separate process
(`MediaReader`) decodes media once, to check and measure them, and the media cache keeps the result for the
workers. Subclasses turn a row into a prompt (`rl_dataset.py`) or a conversation (`sft_dataset.py`).
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from verl.batch_keys import TEACHER_IDS
from verl.config.data import FILES, RowsConfig
from verl.data.bad_rows import BAD_ROW_REMEDY, MAX_LISTED, BadRow, BadRowError, BadRowReport, bad_rows_text
from verl.data.chat_template import ChatTemplate
from verl.data.columns import notes_on_columns
from verl.data.files import Rows, load_mixture, load_rows
from verl.data.media.loader import MediaLoader
from verl.data.media.references import MediaData
from verl.data.messages import Message, media_columns
from verl.data.plain_files import Row, Source
from verl.data.prompt_template import PromptFormat
from verl.data.readers import PositionIds
from verl.data.row_readers import ROW_TIMEOUT_S, MediaReader, scan_rows
from verl.data.teachers import TeacherColumn, TeacherPrompts
from verl.models.families.interface import MediaShape
from verl.utils.rank_logger import get_logger
from verl.utils.registry import Registry

Item = dict[str, Any]
D = TypeVar("D", bound="RowDataset")
DATASETS: Registry[Any] = Registry("data.dataset")  # its names are files only
# Below this number of rows, starting processes takes longer than checking (0.3 ms a text, 10 ms a video).
TEXT_ROWS_FOR_ONE_PROCESS = 4000
MEDIA_ROWS_FOR_ONE_PROCESS = 200
DIGESTED_BYTES = 256  # at each end
DIGESTED_ROWS = 64  # of a stream, evenly spaced
TRAIN_FILES = "data.train_files"
SIMPLE_TYPES = (date, time, timedelta, Decimal)  # whose text says which value it is

logger = get_logger(__name__)


class Rendered(NamedTuple):
    """Text and tokens of a row before its media are opened."""

    text: str
    raw_ids: list[int]  # one token for each medium, as the engine expects
    media: MediaData  # None without any
    messages: list[Message]
    is_trained: Sequence[bool] = ()  # for each of `raw_ids`; empty for a prompt


class Overlong(BadRow):
    """A row of a stream that is left out because it exceeds the token limit."""


class RowCheck(NamedTuple):
    """Result of checking a row."""

    reason: str | None  # why it cannot be used
    length: int = 0
    num_learned: int = 0
    digest: bytes = b""
    late_columns: tuple[str, ...] = ()  # that the file was not known to have


class RowDataset(Dataset, ABC):
    """Items of one or more data files.

    Args:
        files: `PATH[@split]`, or a list of them.
        processor: None for a text model.
        config: The `data` section.
        media: Decodes the rows' media; required with a processor.
        position_ids: Called with token ids (L,) and the shapes of their media; None counts from 0.
        option: The option that named the files, for errors.
        row_timeout_s: Seconds for reading the media of a row; None is unlimited.
        report: Lists the rows that cannot be used.
        tools: Schemas of the tools, for the chat template.
        teachers: Assigns the rows to teachers.
    """

    tensors: ClassVar[tuple[str, ...]]  # names of an item's tensors
    limit_option: ClassVar[str]  # name of the option for the maximum number of tokens
    too_long: ClassVar[str]  # error text after the number of overlong rows

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any,
        processor: Any | None,
        config: Any,
        *,
        media: MediaLoader | None = None,
        position_ids: PositionIds | None = None,
        option: str = TRAIN_FILES,
        row_timeout_s: float | None = ROW_TIMEOUT_S,
        report: BadRowReport | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        teachers: TeacherColumn | None = None,
    ) -> None:
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        self.media, self.position_ids, self.report = media, position_ids, report
        self.teachers = teachers
        self.teacher_prompts: TeacherPrompts | None = None
        self.kinds = () if processor is None or media is None else media.readable
        self._columns = media_columns(config, self.kinds)
        self._reader = None if media is None else MediaReader(media, row_timeout_s, self._columns)
        self.prompt_format = PromptFormat(config.format_prompt)
        template = None if processor is None else processor.chat_template
        self.chat_template = ChatTemplate(
            tokenizer, template, config.apply_chat_template_kwargs, config.override_chat_template, tools=tools
        )
        self.rows = self.open_rows(files, option)
        self.notes = self._check_columns(option)  # on columns that nothing reads
        for note in self.notes:
            logger.warning(note)
        # Of a mapped file those of a sample, until all its rows are read.
        self.columns = dict.fromkeys(column for source in self.rows.sources for column in source.columns)
        self.bad_rows: list[BadRow] = []
        self.num_overlong = 0  # rows left out because they exceed the token limit
        # Tokens of each row, 0 for a bad row. Media tokens only count with `data.filter_overlong_prompts`,
        # because only the filter measures media.
        self.lengths: list[int] = []
        self.num_learned: list[int] = []  # trained tokens of each row; 0 for a prompt
        # Usable rows, numbered over all files; in a stream all of them, since none was checked.
        self.is_stream = config.streaming and option == TRAIN_FILES
        self.indices: Sequence[int] = self._all_rows() if self.is_stream else self._usable_rows(option)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Item | BadRow:
        # An exception in a loader process would reach the user as a traceback.
        row_index = self.indices[index]
        try:
            row, rendered, shape = self._read(row_index)
            if (
                self.is_stream
                and self.config.filter_overlong_prompts
                and len(self._expand(rendered.raw_ids, shape)) > self.limit
            ):
                return Overlong(row_index, self.rows.where(row_index), f"longer than {self.limit} tokens")
            item = self._make_item(row, rendered, shape)
            number = 0
            if self.teachers is not None:
                item[TEACHER_IDS] = number = self.teachers.number(row)
            if self.teacher_prompts is not None:
                item |= self.teacher_prompts.item(number, row_index, item)
            return item
        except (ValueError, TimeoutError) as error:
            return BadRow(row_index, self.rows.where(row_index), str(error))

    def item_of(self, row_index: int) -> Item:
        """Read a row, numbered over all files, with its media."""
        return self._make_item(*self._read(row_index))

    def show_to_teachers(self, prompts: TeacherPrompts) -> None:
        """Add the teachers' views of the prompts to items; rows that a teacher cannot use are left out."""
        unusable = prompts.unusable
        self.teacher_prompts = prompts
        self.indices = [index for index in self.indices if index not in unusable]

    def open_rows(self, files: str | Sequence[str], option: str) -> Rows:
        """Open the rows of the files; a subclass may read files of its own kind, or change the rows."""
        name = option.removeprefix("data.")
        mixed = self.config.files_by_source(name) if name in FILES else {}
        if mixed:
            return load_mixture(mixed, self.config.source_key, name)
        return load_rows(files, option)

    @abstractmethod
    def render(self, row: Row) -> Rendered:
        """Render and tokenize the text of a row, with one token for each medium."""

    def batch(self, items: Sequence[Item]) -> dict[str, Tensor | np.ndarray]:
        """Join items into a batch, with the numbers of their teachers."""
        batch = self.collate(items) | ({} if self.teachers is None else self.teachers.tensors(items))
        return batch if self.teacher_prompts is None else batch | self.teacher_prompts.columns(items)

    @abstractmethod
    def collate(self, items: Sequence[Item]) -> dict[str, Tensor | np.ndarray]:
        """Join items into a batch: tensors (B, ...), other values as object arrays."""

    @abstractmethod
    def _make_item(self, row: Row, rendered: Rendered, shape: MediaShape | None) -> Item: ...

    def _read(self, row_index: int) -> tuple[Row, Rendered, MediaShape | None]:
        row = self.rows[row_index]
        rendered = self.render(row)
        return row, rendered, self._media.read(rendered.media, decode=True) if rendered.media else None

    @staticmethod
    @abstractmethod
    def check_columns(option: str, sources: Sequence[Source], config: Any) -> None:
        """Raise a ValueError unless each file has the columns that a row needs."""

    def _check_columns(self, option: str) -> list[str]:
        self.check_columns(option, self.rows.sources, self.config)
        return notes_on_columns(option, self.rows.sources, self.config, self.prompt_format.names, self.kinds)

    @property
    def limit(self) -> int:
        return getattr(self.config, self.limit_option)

    def inspect(self, index: int) -> RowCheck:
        """Check a row and count its tokens, without decoding its media."""
        try:
            row = self.rows[index]
            rendered = self.render(row)
            if self.teachers is not None:
                self.teachers.number(row)
            ids = rendered.raw_ids
            if rendered.media and self.config.filter_overlong_prompts:
                ids = self._expand(ids, self._media.read(rendered.media, decode=False))
            late = tuple(row.keys() - self.columns)
            return RowCheck(None, len(ids), sum(rendered.is_trained), row_digest(row), late)
        except ValueError as error:
            return RowCheck(str(error))

    def _check_length(self, length: int, text: str) -> None:
        if length > self.limit:
            raise BadRowError(f"{text} {self.limit}: raise it, or set `data.filter_overlong_prompts=true`")

    def _positions(self, ids: Tensor, shape: MediaShape | None) -> Tensor:
        positions = None if self.position_ids is None else self.position_ids(ids, shape or MediaShape())
        return torch.arange(len(ids)) if positions is None else positions  # (L,) or (4, L)

    def _with_order(self, media: MediaData, prompt_ids: Sequence[int]) -> MediaData:
        return media and self._media.loader.with_order(media, prompt_ids)

    def _expand(self, ids: list[int], shape: MediaShape | None) -> list[int]:
        return ids if shape is None else self._media.loader.expand(ids, shape)

    @property
    def _media(self) -> MediaReader:
        assert self._reader is not None, "a dataset with a processor has a media loader"
        return self._reader

    def _all_rows(self) -> range:
        """Return the rows of a stream, which are checked when they are read."""
        total = len(self.rows)
        sample = sorted({place * (total - 1) // (DIGESTED_ROWS - 1) for place in range(DIGESTED_ROWS)})
        digests = b"".join(self._digest_of(index) for index in sample)
        self.digest = hashlib.blake2b(b"%d %s" % (total, digests), digest_size=16).hexdigest()
        logger.info("data opened as a stream: rows=%d", total)
        return range(total)

    def _digest_of(self, index: int) -> bytes:
        try:
            return row_digest(self.rows[index])
        except ValueError:  # which is said when the stream comes to it
            return b"bad row"

    def _usable_rows(self, option: str) -> list[int]:
        workers = self.config.filter_overlong_prompts_workers
        rows_for_one = TEXT_ROWS_FOR_ONE_PROCESS if self.processor is None else MEDIA_ROWS_FOR_ONE_PROCESS
        checks = scan_rows(self.inspect, len(self.rows), workers, rows_for_one)
        # Forked loader processes start their own template and media processes.
        self.prompt_format.close()
        self.chat_template.close()
        if self._reader is not None:
            self._reader.close()
        self.lengths = [check.length for check in checks]
        self.num_learned = [check.num_learned for check in checks]
        usable = []
        for index, check in enumerate(checks):
            self.columns.update(dict.fromkeys(sorted(check.late_columns)))
            if check.reason is not None:
                self.bad_rows.append(BadRow(index, self.rows.where(index), check.reason))
            elif self.config.filter_overlong_prompts and check.length > self.limit:
                self.num_overlong += 1
            else:
                usable.append(index)
        # Of the usable rows in their order.
        digests = b"".join(checks[index].digest for index in usable)
        self.digest = hashlib.blake2b(digests, digest_size=16).hexdigest()
        self._report_bad_rows(option)
        logger.info(
            "data opened: option=%s rows=%d overlong=%d bad=%d used=%d",
            option, len(self.rows), self.num_overlong, len(self.bad_rows), len(usable),
        )  # fmt: skip
        if not usable:
            raise ValueError(
                f"`{option}` has {len(self.rows)} rows and none can be used: {self.num_overlong}"
                f" {self.too_long} ({self.limit}), {len(self.bad_rows)} rows are bad"
            )
        return usable

    def _report_bad_rows(self, option: str) -> None:
        if not self.bad_rows:
            return
        is_error = self.config.on_bad_row == "error"
        text = bad_rows_text(option, self.bad_rows)
        # An error that shows all rows needs no report: a run that never started leaves no files.
        if self.report is not None and (not is_error or len(self.bad_rows) > MAX_LISTED):
            self.report.add(self.bad_rows)
            text += f"\n  all of them: {self.report.path}"
        if is_error:
            raise ValueError(text + BAD_ROW_REMEDY)
        logger.warning(text)


def row_digest(row: Row) -> bytes:
    """Digest of a row's values; of bytes, such as an image, only their number and their two ends."""
    text = json.dumps(row, default=_as_text, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} {value[:DIGESTED_BYTES].hex()} {value[-DIGESTED_BYTES:].hex()}"
    if isinstance(value, np.ndarray | np.generic):
        return str(value.tolist())
    return str(value) if isinstance(value, SIMPLE_TYPES) else type(value).__name__


def dataset_class(data: RowsConfig, built_in: type[D]) -> type[D]:
    """Return the class that `data.dataset` names, or the built-in one."""
    if data.dataset is None:
        return built_in
    own = DATASETS[data.dataset]
    if not (isinstance(own, type) and issubclass(own, built_in)):
        raise ValueError(
            f"`{DATASETS.option}` ({data.dataset}) must be a class derived from"
            f" {built_in.__module__}.{built_in.__name__}"
        )
    return own
