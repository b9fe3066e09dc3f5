# SPDX-License-Identifier: Apache-2.0
"""Conversations to train on: chat messages with the assistant's turns, or a prompt and its response.

A batch has the keys that the policy update reads: `responses` are all tokens after the first one, and
`loss_mask` marks the assistant's.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.data.bad_rows import BadRowError
from verl.data.chat_tokens import ConversationTokenizer, check_offsets
from verl.data.columns import check_conversation_columns
from verl.data.dataset import Item, Rendered, RowDataset
from verl.data.messages import conversation_of, media_of, tools_of
from verl.data.plain_files import Row
from verl.models.families.interface import MediaShape
from verl.utils.plain_data import objects

HIDDEN = -1  # replaces tokens of the assistant while media are expanded; not a token of any tokenizer


class SFTDataset(RowDataset):
    """Conversations of one or more data files; see `RowDataset` for arguments and attributes.

    An item has `input_ids` and `is_trained` (L,) int64, `position_ids` (L,) or (4, L), and
    `multi_modal_data`. The tokenizer must be a fast one.

    Example::

        dataset = SFTDataset("train.jsonl", tokenizer, None, config.data)
        batch = DataProto.from_single_dict(dataset.collate([dataset[0], dataset[1]]))
    """

    tensors = ("input_ids", "is_trained", "position_ids")
    limit_option = "max_length"
    too_long = "conversations are longer than `data.max_length`"
    check_columns = staticmethod(check_conversation_columns)

    def __init__(self, files: Any, tokenizer: Any, processor: Any, config: Any, **options: Any) -> None:
        check_offsets(tokenizer)
        super().__init__(files, tokenizer, processor, config, **options)

    @cached_property
    def _tokenize(self) -> ConversationTokenizer:
        return ConversationTokenizer(self.tokenizer, self.chat_template, self.config.train_turns)

    def render(self, row: Row) -> Rendered:
        messages = conversation_of(row, self.config, self.prompt_format, self.kinds)
        media = media_of(row, messages, self.config, self.kinds)
        text, ids, is_trained = self._tokenize(messages, tools_of(row, self.config.tools_key))
        if self.processor is not None:
            learned = set(compress(ids, is_trained))
            if learned & self._media.family.placeholders(self.processor).keys():
                raise BadRowError(
                    "an assistant turn contains an image or a video, which cannot be trained on"
                )
        return Rendered(text, ids, self._with_order(media, ids), messages, is_trained)

    def collate(self, items: Sequence[Item]) -> dict[str, Tensor | np.ndarray]:
        """Join conversations, padded on the right to T = `data.max_length`."""
        ids = self._stacked(items, "input_ids", self.tokenizer.pad_token_id)  # (B, T)
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(self.limit) < lengths.unsqueeze(-1)).long(),  # (B, T)
            "position_ids": self._stacked(items, "position_ids", 0),  # (B, T) or (B, 4, T)
            "responses": ids[:, 1:],  # (B, T - 1)
            "loss_mask": self._stacked(items, "is_trained", 0)[:, 1:],  # (B, T - 1)
            "multi_modal_data": objects(item["multi_modal_data"] for item in items),
        }

    def _stacked(self, items: Sequence[Item], name: str, padding: int) -> Tensor:
        values = [torch.as_tensor(item[name]) for item in items]
        return torch.stack([F.pad(one, (0, self.limit - one.shape[-1]), value=padding) for one in values])

    def _make_item(self, row: Row, rendered: Rendered, shape: MediaShape | None) -> Item:
        ids, is_trained = rendered.raw_ids, rendered.is_trained
        if shape is not None:
            ids, is_trained = self._expanded(ids, is_trained, shape)
        self._check_length(len(ids), f"the conversation has {len(ids)} tokens, `data.max_length` is")
        input_ids = torch.tensor(ids, dtype=torch.int64)  # (L,)
        return {
            "input_ids": input_ids,
            "is_trained": torch.tensor(is_trained, dtype=torch.int64),
            "position_ids": self._positions(input_ids, shape),
            "multi_modal_data": rendered.media,
        }

    def _expanded(
        self, ids: list[int], is_trained: Sequence[bool], shape: MediaShape
    ) -> tuple[list[int], list[bool]]:
        """Expand media tokens outside of the trained tokens, which only move."""
        learned = compress(ids, is_trained)
        hidden = [HIDDEN if trained else token for token, trained in zip(ids, is_trained, strict=True)]
        expanded = self._expand(hidden, shape)
        moved = [token == HIDDEN for token in expanded]
        return [next(learned) if token == HIDDEN else token for token in expanded], moved
