# SPDX-License-Identifier: Apache-2.0
"""Prompts from data rows: rendered, tokenized, measured, with their media by reference.

An item of `RLHFDataset` is one prompt; `collate_fn` joins items into a batch.
"""

from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.batch_keys import BATCH_KEYS
from verl.config.data import DataConfig
from verl.config.distillation import TEACHERS, DistillationConfig
from verl.data.chat_template import check_shown
from verl.data.columns import answer_of, check_category_columns, check_prompt_columns
from verl.data.dataset import Item, Rendered, RowDataset
from verl.data.media.cache import MediaCache
from verl.data.media.sizes import MediaOptions
from verl.data.messages import media_of, prompt_of
from verl.data.plain_files import Row
from verl.data.readers import load_readers
from verl.data.teachers import TeacherPrompts, media_of_teacher
from verl.models.families.interface import MediaShape
from verl.utils.plain_data import objects
from verl.utils.rank_logger import get_logger

TENSORS = ("prompts", "prompt_mask", "prompt_position_ids")
VAL_FILES = "data.val_files"
COLUMNS = ("raw_prompt_ids", "prompt_text", "prompt_messages", "ground_truth", "multi_modal_data")

logger = get_logger(__name__)


class RLHFDataset(RowDataset):
    """Prompts of one or more data files; see `RowDataset` for arguments and attributes.

    An item has `prompts` and `prompt_mask` (P,) int64, `prompt_position_ids` (P,) or (4, P), all left-padded,
    the `COLUMNS`, and every column of the row but its media.

    Example::

        dataset = RLHFDataset("train.jsonl", tokenizer, None, config.data)
        batch = DataProto.from_single_dict(collate_fn([dataset[0], dataset[1]]))
    """

    tensors = TENSORS
    limit_option = "max_prompt_length"
    too_long = "prompts are longer than `data.max_prompt_length`"
    check_columns = staticmethod(check_prompt_columns)

    def __init__(self, *arguments: Any, reserved: Container[str] = (), **options: Any) -> None:
        # `reserved` are names that columns must not use in a batch.
        super().__init__(*arguments, **options)
        if self.rows.mixed and (self.rows.column in TENSORS + COLUMNS or self.rows.column in reserved):
            raise ValueError(f"`data.source_key` ({self.rows.column}) must not be the name of a batch key")
        self._names = self._column_names(reserved)
        self._unknown: set[str] = set()  # columns that were warned of

    def _check_columns(self, option: str) -> list[str]:
        notes = super()._check_columns(option)
        if option == VAL_FILES:
            check_category_columns(self.rows.sources, self.config)
        return notes

    def render(self, row: Row) -> Rendered:
        messages = prompt_of(row, self.config, self.prompt_format, self.kinds)
        media = media_of(row, messages, self.config, self.kinds)
        render = partial(self.chat_template, add_generation_prompt=True, name="the prompt")
        text = render(messages)
        check_shown(messages, text, render)
        prompt_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Rendered(text, prompt_ids, self._with_order(media, prompt_ids), messages)

    def collate(self, items: Sequence[Item]) -> dict[str, Tensor | np.ndarray]:
        return collate_fn(items)

    def _make_item(self, row: Row, rendered: Rendered, shape: MediaShape | None) -> Item:
        self._warn_of_columns(row)
        ids = torch.tensor(self._expand(rendered.raw_ids, shape), dtype=torch.int64)  # (L,)
        self._check_length(len(ids), f"the prompt has {len(ids)} tokens, `data.max_prompt_length` is")
        item = {
            "prompts": _left_pad(ids, self.limit, self.tokenizer.pad_token_id),
            "prompt_mask": _left_pad(torch.ones_like(ids), self.limit, 0),
            "prompt_position_ids": _left_pad(self._positions(ids, shape), self.limit, 0),  # (P,) or (4, P)
            "raw_prompt_ids": rendered.raw_ids,
            "prompt_text": rendered.text,
            "prompt_messages": rendered.messages,
            "ground_truth": answer_of(row, self.config.answer_key),
            "multi_modal_data": rendered.media,
        }
        return item | {name: row.get(column) for column, name in self._names.items()}

    def _warn_of_columns(self, row: Row) -> None:
        """Say once that a stream's row has a column that no row of the sample has."""
        for column in row.keys() - self.columns - self._unknown:
            self._unknown.add(column)
            logger.warning(
                "a column is not passed on, because no row of the sample has it: column=%s (give it to the"
                " first row of its file, as null for example)", column,
            )  # fmt: skip

    def _column_names(self, reserved: Container[str]) -> dict[str, str]:
        """Map the columns that travel with the prompt to their names in the batch."""
        config, names = self.config, {}
        media = {config.image_key, config.video_key, *self._columns.values()}
        read = {config.prompt_key, config.answer_key}
        for column in self.columns:
            is_taken = column in TENSORS + COLUMNS or column in reserved
            if column in media or (is_taken and column in read):
                continue
            names[column] = column
            if is_taken:
                names[column] = name = f"{column}_column"
                logger.warning("a column has the name of a batch key and is renamed: %s -> %s", column, name)
        return names


def collate_fn(items: Sequence[Item]) -> dict[str, Tensor | np.ndarray]:
    """Join prompts into a batch: tensors (B, ...), other columns as object arrays, None where missing."""
    names = dict.fromkeys(name for item in items for name in item)
    joined = {name: objects(item.get(name) for item in items) for name in names}
    return joined | {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in TENSORS}


def show_to_teachers(
    dataset: RLHFDataset, data: DataConfig, distillation: DistillationConfig, options: MediaOptions,
    cache: MediaCache | None,
) -> None:  # fmt: skip
    """Add the prompts of teachers that see other frames than the policy, if there are any."""
    views, width = {}, data.max_prompt_length
    for number, (name, teacher) in enumerate(distillation.teachers.items()):
        if teacher.num_video_frames is not None:
            seen = media_of_teacher(teacher, options)
            template, option = data.override_chat_template, f"{TEACHERS}.{name}"
            readers = load_readers(teacher.model, template, seen, cache, option=option)
            own = replace(data, max_prompt_length=teacher.max_prompt_length or data.max_prompt_length)
            views[number] = type(dataset)(
                data.train_files, readers.tokenizer, readers.processor, own,
                media=readers.media, position_ids=readers.position_ids, row_timeout_s=data.row_timeout_s,
                reserved=BATCH_KEYS,
            )  # fmt: skip
            width = max(width, views[number].limit)
    if views:
        dataset.show_to_teachers(TeacherPrompts(views, width))


def _left_pad(values: Tensor, length: int, padding: int) -> Tensor:
    return torch.nn.functional.pad(values, (length - values.shape[-1], 0), value=padding)
