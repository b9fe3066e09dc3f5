# SPDX-License-Identifier: Apache-2.0
"""Prompts from rows of data: rendered, tokenized, measured, with their media by reference.

`RLHFDataset` opens the files, checks every row once and leaves out (or refuses) those that cannot be used;
one item is one prompt. `collate_fn` joins items to a batch. Nothing here keeps pixels: the dataset decodes a
row's media to be sure that it can be decoded and to know its size, and the media cache keeps the result for
the workers. Media are opened in a process beside the one that reads (`MediaReader`): a file that crashes or
hangs its decoder is a bad row like any other.
"""

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from verl.utils.bad_rows import BAD_ROW_REMEDY, BadRow, BadRowError, BadRowReport
from verl.utils.data_files import Row, load_rows
from verl.utils.media_reader import ROW_TIMEOUT_S, MediaReader
from verl.utils.multimodal import MediaData, MediaLoader, MediaShape, expand_prompt
from verl.utils.plain_data import objects
from verl.utils.prompt_format import PromptFormat
from verl.utils.prompts import RowMedia, build_messages, check_counts, references
from verl.utils.rank_logger import get_logger
from verl.utils.row_scan import scan_rows

Item = dict[str, Any]
TENSORS = ("prompts", "prompt_mask", "prompt_position_ids")
COLUMNS = ("raw_prompt_ids", "prompt_text", "prompt_messages", "ground_truth", "multi_modal_data")
WRITTEN = (*TENSORS, *COLUMNS)
MAX_LISTED = 10
# With fewer rows, starting processes takes longer than checking the rows (text 0.2 ms, a video 10 ms).
TEXT_ROWS_FOR_ONE_PROCESS = 4000
MEDIA_ROWS_FOR_ONE_PROCESS = 200

logger = get_logger(__name__)


class Rendered(NamedTuple):
    """A row on its way to a prompt: text and media, before the media are opened."""

    text: str
    raw_ids: list[int]
    media: RowMedia
    messages: list[dict[str, Any]]


class Finding(NamedTuple):
    """What the check of a row found: why it cannot be used, or how long its prompt is."""

    reason: str | None
    length: int


class RLHFDataset(Dataset):
    """Prompts of one or more data files.

    Example::

        dataset = RLHFDataset("train.jsonl", tokenizer, None, config.data)
        batch = DataProto.from_single_dict(collate_fn([dataset[0], dataset[1]]))

    Args:
        files: `PATH[@split]`, or a list of them.
        tokenizer: With a chat template.
        processor: Of a model that reads images and videos, else None.
        config: The `data` section.
        media: Decodes the rows' media; required with a processor.
        position_ids: Positions of a prompt, called with token ids (L,) and the grids of its media; None
            counts from 0.
        option: The option that named the files, for errors.
        reserved: Names that columns may not have in a batch.
        row_timeout_s: Seconds that reading a row's media may take; None is without limit.
        report: Lists the rows that cannot be used.

    Attributes:
        bad_rows: Rows left out when the files were checked.
        num_overlong: Rows left out because their prompt is longer than `data.max_prompt_length`.
        lengths: Tokens of each row's prompt, 0 of a bad row; those of media only count with
            `data.filter_overlong_prompts`, which is what measures media.
        indices: The rows that are used, by their number over all files.

    Raises:
        ValueError: A column is missing, a row cannot be used (`data.on_bad_row=error`), or no row is left.
    """

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
        reserved: Container[str] = (),
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
        self._names = self._column_names(reserved)
        self.bad_rows: list[BadRow] = []
        self.num_overlong = 0
        self.lengths: list[int] = []
        self.indices = self._usable_rows(option)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Item | BadRow:
        """One prompt, or a `BadRow` in place of one that cannot be used.

        It is returned rather than raised: an exception in a loader process reaches the user as a traceback.

        Returns:
            `prompts`, `prompt_mask` (P,) int64 and `prompt_position_ids` (P,) or (4, P), left-padded;
            the `COLUMNS`, and every other column of the row.
        """
        row_index = self.indices[index]
        try:
            return self._item(self.rows[row_index])
        except (ValueError, TimeoutError) as error:
            return BadRow(row_index, self.rows.where(row_index), str(error))

    def render(self, row: Row) -> Rendered:
        """The text of a row's prompt and its tokens, one for each image and video, as the engine takes them.

        Raises:
            ValueError: The prompt, the template or the media column is wrong.
        """
        config = self.config
        for key in ("prompt_key", "answer_key"):
            if getattr(config, key) not in row:
                raise BadRowError(
                    f"column `{getattr(config, key)}` (`data.{key}`) is missing; the row has {sorted(row)}"
                )
        messages = build_messages(row[config.prompt_key], row, self.prompt_format, self.processor is not None)
        read = partial(references, allow_urls=config.allow_media_urls)
        media = RowMedia(
            read(row.get(config.image_key), "image", config.image_dir),
            read(row.get(config.video_key), "video", config.video_dir or config.image_dir),
        )
        if self.processor is not None:
            check_counts(messages, media, config.image_key, config.video_key)
        elif media.images or media.videos:
            raise BadRowError("the row has images or videos, which the model cannot read")
        template = None if self.processor is None else self.processor.chat_template
        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False
            )
            text.encode()  # the tokenizer speaks of types where half a character is alone
            raw_ids = self.tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the template is code of its own
            raise BadRowError(f"the chat template cannot render the prompt: {error}") from error
        return Rendered(text, raw_ids, media, messages)

    def inspect(self, index: int) -> Finding:
        """Check a row of the files without decoding its media, and count its tokens."""
        try:
            rendered = self.render(self.rows[index])
            if not any(rendered.media) or not self.config.filter_overlong_prompts:
                return Finding(None, len(rendered.raw_ids))
            shape = self._media_reader.measure(_media_data(rendered.media))
            return Finding(None, len(expand_prompt(rendered.raw_ids, self.processor, shape)))
        except ValueError as error:
            return Finding(str(error), 0)

    @property
    def _media_reader(self) -> MediaReader:
        assert self._reader is not None, "a dataset with a processor has a media loader"
        return self._reader

    def _item(self, row: Row) -> Item:
        rendered = self.render(row)
        media = _media_data(rendered.media)
        prompt_ids, grids = rendered.raw_ids, {}
        if media:
            shape = self._media_reader.decode(media)
            prompt_ids = expand_prompt(prompt_ids, self.processor, shape)
            grids = _grids(shape)
        limit = self.config.max_prompt_length
        if len(prompt_ids) > limit:
            raise BadRowError(
                f"the prompt has {len(prompt_ids)} tokens, `data.max_prompt_length` is {limit}:"
                " raise it, or set `data.filter_overlong_prompts=true`"
            )
        ids = torch.tensor(prompt_ids, dtype=torch.int64)  # (L,)
        positions = torch.arange(len(ids)) if self.position_ids is None else self.position_ids(ids, **grids)
        item = {
            "prompts": _left_pad(ids, limit, self.tokenizer.pad_token_id),
            "prompt_mask": _left_pad(torch.ones_like(ids), limit, 0),
            "prompt_position_ids": _left_pad(positions, limit, 0),  # (P,) or (4, P)
            "raw_prompt_ids": rendered.raw_ids,
            "prompt_text": rendered.text,
            "prompt_messages": rendered.messages,
            "ground_truth": row[self.config.answer_key],
            "multi_modal_data": media,
        }
        return item | {name: row.get(column) for column, name in self._names.items()}

    def _check_columns(self, option: str) -> None:
        for source in self.rows.sources:
            for key in ("prompt_key", "answer_key"):
                name = getattr(self.config, key)
                if name not in source.columns:
                    raise ValueError(
                        f"`{option}`: {source.name} has no column `{name}`: it has {source.columns};"
                        f" set `data.{key}` to one of them"
                    )

    def _column_names(self, reserved: Container[str]) -> dict[str, str]:
        """The columns that travel with the prompt and their names in the batch."""
        config = self.config
        used = {config.prompt_key, config.answer_key, config.image_key, config.video_key}
        names = {}
        for column in dict.fromkeys(column for source in self.rows.sources for column in source.columns):
            if column in used:
                continue
            names[column] = column
            if column in WRITTEN or column in reserved:
                names[column] = f"{column}_column"
                logger.warning(
                    "a column has the name of a batch key and is renamed: %s -> %s", column, names[column]
                )
        return names

    def _usable_rows(self, option: str) -> list[int]:
        workers = self.config.filter_overlong_prompts_workers
        rows_for_one = TEXT_ROWS_FOR_ONE_PROCESS if self.processor is None else MEDIA_ROWS_FOR_ONE_PROCESS
        findings = scan_rows(partial(_inspect_part, self), len(self.rows), workers, rows_for_one)
        self.prompt_format.close()  # processes that are forked from this one have their own
        if self._reader is not None:
            self._reader.close()
        self.lengths = [finding.length for finding in findings]
        for index, finding in enumerate(findings):
            if finding.reason is not None:
                self.bad_rows.append(BadRow(index, self.rows.where(index), finding.reason))
        self._tell_bad_rows(option)
        bad = {row.index for row in self.bad_rows}
        usable = [index for index in range(len(self.rows)) if index not in bad]
        if self.config.filter_overlong_prompts:
            fitting = [index for index in usable if findings[index].length <= self.config.max_prompt_length]
            self.num_overlong = len(usable) - len(fitting)
            usable = fitting
        logger.info(
            "data opened: option=%s rows=%d overlong=%d bad=%d used=%d",
            option, len(self.rows), self.num_overlong, len(bad), len(usable),
        )  # fmt: skip
        if not usable:
            raise ValueError(
                f"`{option}` has {len(self.rows)} rows and none can be used: {self.num_overlong} prompts are"
                f" longer than `data.max_prompt_length` ({self.config.max_prompt_length}), {len(bad)} rows"
                " are bad"
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


def collate_fn(items: Sequence[Item]) -> dict[str, Tensor | np.ndarray]:
    """Join prompts: tensors (B, ...), the rest as object arrays; a column that a row lacks is None."""
    names = dict.fromkeys(name for item in items for name in item)
    batch: dict[str, Tensor | np.ndarray] = {
        name: objects(item.get(name) for item in items) for name in names
    }
    return batch | {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in TENSORS}


def _inspect_part(dataset: RLHFDataset, part: range) -> list[Finding]:
    return [dataset.inspect(index) for index in part]


def _media_data(media: RowMedia) -> MediaData:
    return {"images": media.images, "videos": media.videos} if any(media) else None


def _grids(shape: MediaShape) -> dict[str, Tensor]:
    return {
        "image_grid_thw": shape.image_grid_thw,
        "video_grid_thw": shape.video_grid_thw,
        "second_per_grid_ts": shape.second_per_grid_ts,
    }


def _left_pad(values: Tensor, length: int, padding: int) -> Tensor:
    return torch.nn.functional.pad(values, (length - values.shape[-1], 0), value=padding)
