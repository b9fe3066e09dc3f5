# SPDX-License-Identifier: Apache-2.0
"""Rows of data as items of a batch: opened, checked once, read with their media by reference.

`RowDataset` opens the files, checks every row and leaves out (or refuses) those that cannot be used. Nothing
here keeps pixels: a row's media are decoded to be sure that they can be and to know their size, and the media
cache keeps the result for the workers. Media are opened in a process beside the one that reads
(`MediaReader`): a file that crashes or hangs its decoder is a bad row like any other.

What a row becomes is a subclass: a prompt (`dataset.py`), or a conversation to learn from (`sft_dataset.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from verl.data.bad_rows import BAD_ROW_REMEDY, BadRow, BadRowError, BadRowReport
from verl.data.files import Row, load_rows
from verl.data.media.isolated_reader import ROW_TIMEOUT_S, MediaReader
from verl.data.media.loader import MediaData, MediaLoader
from verl.data.media.tokens import MediaShape, expand_prompt
from verl.data.messages import Message, RowMedia, check_counts, references
from verl.data.prompt_template import PromptFormat
from verl.data.row_scan import scan_rows
from verl.utils.plain_data import objects
from verl.utils.rank_logger import get_logger

Item = dict[str, Any]
MAX_LISTED = 10
# With fewer rows, starting processes takes longer than checking the rows (text 0.2 ms, a video 10 ms).
TEXT_ROWS_FOR_ONE_PROCESS = 4000
MEDIA_ROWS_FOR_ONE_PROCESS = 200

logger = get_logger(__name__)


@dataclass(frozen=True)
class Rendered:
    """A row on its way to an item: text and media, before the media are opened."""

    text: str
    raw_ids: list[int]  # one for each image and video, as the engine takes them
    media: RowMedia
    messages: list[Message]

    @property
    def num_learned(self) -> int:
        """Tokens that are learned; none of a prompt."""
        return 0


class Finding(NamedTuple):
    """What the check of a row found: why it cannot be used, or how many tokens it has and are learned."""

    reason: str | None
    length: int = 0
    num_learned: int = 0


class RowDataset(Dataset, ABC):
    """Items of one or more data files.

    Args:
        files: `PATH[@split]`, or a list of them.
        tokenizer: With a chat template.
        processor: Of a model that reads images and videos, else None.
        config: The `data` section.
        media: Decodes the rows' media; required with a processor.
        position_ids: Positions of tokens, called with their ids (L,) and the grids of their media; None
            counts from 0.
        option: The option that named the files, for errors.
        row_timeout_s: Seconds that reading a row's media may take; None is without limit.
        report: Lists the rows that cannot be used.

    Attributes:
        bad_rows: Rows left out when the files were checked.
        num_overlong: Rows left out because they have more tokens than the limit.
        lengths: Tokens of each row, 0 of a bad row; those of media only count with
            `data.filter_overlong_prompts`, which is what measures media.
        num_learned: Tokens of each row that are learned, 0 of a bad row and of a prompt.
        indices: The rows that are used, by their number over all files.

    Raises:
        ValueError: A column is missing, a row cannot be used (`data.on_bad_row=error`), or no row is left.
    """

    tensors: ClassVar[tuple[str, ...]]  # what of an item is a tensor
    limit_option: ClassVar[str]  # how many tokens it may have
    too_long: ClassVar[str]  # says of several that they have more

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any,
        processor: Any | None,
        config: Any,
        *,
        media: MediaLoader | None = None,
        position_ids: Callable[..., Tensor] | None = None,
        option: str = "data.train_files",
        row_timeout_s: float | None = ROW_TIMEOUT_S,
        report: BadRowReport | None = None,
    ) -> None:
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        self.media, self.position_ids, self.report = media, position_ids, report
        columns = {"images": config.image_key, "videos": config.video_key}
        self._reader = None if media is None else MediaReader(media, row_timeout_s, columns)
        self.prompt_format = PromptFormat(config.format_prompt)
        self.rows = load_rows(files, option)
        self._check_columns(option)
        self.bad_rows: list[BadRow] = []
        self.num_overlong = 0
        self.lengths: list[int] = []
        self.num_learned: list[int] = []
        self.indices = self._usable_rows(option)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Item | BadRow:
        """One item, or a `BadRow` in place of one that cannot be used.

        It is returned rather than raised: an exception in a loader process reaches the user as a traceback.
        """
        row_index = self.indices[index]
        try:
            return self._item(self.rows[row_index])
        except (ValueError, TimeoutError) as error:
            return BadRow(row_index, self.rows.where(row_index), str(error))

    @abstractmethod
    def render(self, row: Row) -> Rendered:
        """The text of a row and its tokens, one for each image and video.

        Raises:
            ValueError: A column or the template is wrong.
        """

    @abstractmethod
    def collate(self, items: Sequence[Item]) -> dict[str, Tensor | np.ndarray]:
        """Join items to a batch: tensors (B, ...), the rest as object arrays."""

    @abstractmethod
    def _made(self, row: Row, rendered: Rendered, shape: MediaShape | None) -> Item:
        """The item of a row whose media were decoded."""

    @abstractmethod
    def _check_columns(self, option: str) -> None:
        """Raise a ValueError if a file lacks a column."""

    @property
    def limit(self) -> int:
        """Tokens of an item at most."""
        return getattr(self.config, self.limit_option)

    def inspect(self, index: int) -> Finding:
        """Check a row of the files without decoding its media, and count its tokens."""
        try:
            rendered = self.render(self.rows[index])
            if not any(rendered.media) or not self.config.filter_overlong_prompts:
                return Finding(None, len(rendered.raw_ids), rendered.num_learned)
            shape = self._media_reader.measure(media_data(rendered.media))
            length = len(expand_prompt(rendered.raw_ids, self.processor, shape))
            return Finding(None, length, rendered.num_learned)
        except ValueError as error:
            return Finding(str(error))

    def media_of(self, row: Row, messages: list[Message]) -> RowMedia:
        """References to a row's media, as many as its messages show.

        Raises:
            BadRowError: The numbers differ, or the model reads no media.
        """
        config = self.config
        read = partial(references, allow_urls=config.allow_media_urls)
        media = RowMedia(
            read(row.get(config.image_key), "image", config.image_dir),
            read(row.get(config.video_key), "video", config.video_dir or config.image_dir),
        )
        if self.processor is not None:
            check_counts(messages, media, config.image_key, config.video_key)
        elif media.images or media.videos:
            raise BadRowError("the row has images or videos, which the model cannot read")
        return media

    @property
    def chat_template(self) -> str | None:
        """The processor's, which may differ from the tokenizer's; None is the tokenizer's."""
        return None if self.processor is None else self.processor.chat_template

    @property
    def _media_reader(self) -> MediaReader:
        assert self._reader is not None, "a dataset with a processor has a media loader"
        return self._reader

    def _item(self, row: Row) -> Item:
        rendered = self.render(row)
        media = media_data(rendered.media)
        return self._made(row, rendered, self._media_reader.decode(media) if media else None)

    def _positions(self, ids: Tensor, shape: MediaShape | None) -> Tensor:
        """(L,) or (4, L)."""
        if self.position_ids is None:
            return torch.arange(len(ids))
        grids = {}
        if shape is not None:
            grids = {
                "image_grid_thw": shape.image_grid_thw,
                "video_grid_thw": shape.video_grid_thw,
                "second_per_grid_ts": shape.second_per_grid_ts,
            }
        return self.position_ids(ids, **grids)

    def _usable_rows(self, option: str) -> list[int]:
        workers = self.config.filter_overlong_prompts_workers
        rows_for_one = TEXT_ROWS_FOR_ONE_PROCESS if self.processor is None else MEDIA_ROWS_FOR_ONE_PROCESS
        findings = scan_rows(partial(_inspect_part, self), len(self.rows), workers, rows_for_one)
        self.prompt_format.close()  # processes that are forked from this one have their own
        if self._reader is not None:
            self._reader.close()
        self.lengths = [finding.length for finding in findings]
        self.num_learned = [finding.num_learned for finding in findings]
        for index, finding in enumerate(findings):
            if finding.reason is not None:
                self.bad_rows.append(BadRow(index, self.rows.where(index), finding.reason))
        self._tell_bad_rows(option)
        bad = {row.index for row in self.bad_rows}
        usable = [index for index in range(len(self.rows)) if index not in bad]
        if self.config.filter_overlong_prompts:
            fitting = [index for index in usable if findings[index].length <= self.limit]
            self.num_overlong = len(usable) - len(fitting)
            usable = fitting
        logger.info(
            "data opened: option=%s rows=%d overlong=%d bad=%d used=%d",
            option, len(self.rows), self.num_overlong, len(bad), len(usable),
        )  # fmt: skip
        if not usable:
            raise ValueError(
                f"`{option}` has {len(self.rows)} rows and none can be used: {self.num_overlong}"
                f" {self.too_long} ({self.limit}), {len(bad)} rows are bad"
            )
        return usable

    def _tell_bad_rows(self, option: str) -> None:
        if not self.bad_rows:
            return
        listed = [str(row) for row in self.bad_rows[:MAX_LISTED]]
        if len(self.bad_rows) > MAX_LISTED:
            listed.append(f"... and {len(self.bad_rows) - MAX_LISTED} more")
        is_told = self.config.on_bad_row == "error" and len(self.bad_rows) <= MAX_LISTED
        if self.report is not None and not is_told:  # a run that never began leaves nothing behind
            self.report.add(self.bad_rows)
            listed.append(f"all of them: {self.report.path}")
        text = "\n  ".join([f"`{option}`: {len(self.bad_rows)} rows cannot be used:", *listed])
        if self.config.on_bad_row == "error":
            raise ValueError(text + BAD_ROW_REMEDY)
        logger.warning(text)


def joined_columns(items: Sequence[Item]) -> dict[str, np.ndarray]:
    """All columns of items as object arrays; one that an item lacks is None there."""
    names = dict.fromkeys(name for item in items for name in item)
    return {name: objects(item.get(name) for item in items) for name in names}


def media_data(media: RowMedia) -> MediaData:
    """A row's media as batches hold them."""
    return {"images": media.images, "videos": media.videos} if any(media) else None


def _inspect_part(dataset: RowDataset, part: range) -> list[Finding]:
    return [dataset.inspect(index) for index in part]
