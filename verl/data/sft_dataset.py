# SPDX-License-Identifier: Apache-2.0
"""Conversations to learn from: chat messages with the assistant's turns, or a prompt and its response.

An item of `SFTDataset` is one conversation as tokens, with its media by reference. A batch has the keys that
the policy's update reads: the tokens after the first one are its `responses`, those of the assistant their
`response_mask`. How rows are opened and checked stands in `row_dataset.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.data.bad_rows import BadRowError
from verl.data.chat_tokens import ConversationTokenizer
from verl.data.dataset import Item, Rendered, RowDataset, media_data
from verl.data.files import Row
from verl.data.media.tokens import MediaShape, expand_prompt
from verl.data.messages import Message, build_conversation, build_messages
from verl.utils.plain_data import objects

HIDDEN = -1  # stands for a token of the assistant while media are expanded: no tokenizer has it


@dataclass(frozen=True)
class RenderedConversation(Rendered):
    """A conversation, before its media are opened."""

    is_trained: list[bool]  # of `raw_ids`

    @property
    def num_learned(self) -> int:
        """Tokens that are learned: the assistant's, which hold no media."""
        return sum(self.is_trained)


class SFTDataset(RowDataset):
    """Conversations of one or more data files; see `RowDataset` for arguments and attributes.

    An item holds `input_ids` and `is_trained` (L,) int64, `position_ids` (L,) or (4, L), and
    `multi_modal_data`.

    Example::

        dataset = SFTDataset("train.jsonl", tokenizer, None, config.data)
        batch = DataProto.from_single_dict(dataset.collate([dataset[0], dataset[1]]))
    """

    tensors = ("input_ids", "is_trained", "position_ids")
    limit_option = "max_length"
    too_long = "conversations are longer than `data.max_length`"

    def __init__(
        self, files: str | Sequence[str], tokenizer: Any, processor: Any | None, config: Any, **options: Any
    ) -> None:
        """Open and check the rows, as `RowDataset` does; the tokenizer must be a fast one."""
        template = None if processor is None else processor.chat_template
        self._tokenize = ConversationTokenizer(tokenizer, template, config.train_turns)
        super().__init__(files, tokenizer, processor, config, **options)

    def render(self, row: Row) -> RenderedConversation:
        """The text of a row's conversation and its tokens, one for each image and video.

        Raises:
            ValueError: The messages, the template or the media column is wrong.
        """
        messages = self._messages(row)
        media = self.media_of(row, messages)
        text, ids, is_trained = self._tokenize(messages)
        if self.processor is not None:
            learned = {token for token, is_so in zip(ids, is_trained, strict=True) if is_so}
            if learned & {self.processor.image_token_id, self.processor.video_token_id}:
                raise BadRowError("the assistant shows an image or a video, which cannot be learned")
        return RenderedConversation(text, ids, media, messages, is_trained)

    def collate(self, items: Sequence[Item]) -> dict[str, Tensor | np.ndarray]:
        """Join conversations, padded on the right to T = `data.max_length`.

        Returns:
            `input_ids`, `attention_mask` (B, T), `position_ids` (B, T) or (B, 4, T), `responses`,
            `response_mask` (B, T - 1): all tokens but the first, and which of them are learned;
            `multi_modal_data`.
        """
        ids = self._stacked(items, "input_ids", self.tokenizer.pad_token_id)  # (B, T)
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(self.limit) < lengths.unsqueeze(-1)).long(),  # (B, T)
            "position_ids": self._stacked(items, "position_ids", 0),
            "responses": ids[:, 1:],
            "response_mask": self._stacked(items, "is_trained", 0)[:, 1:],
            "multi_modal_data": objects(item["multi_modal_data"] for item in items),
        }

    def _stacked(self, items: Sequence[Item], name: str, padding: int) -> Tensor:
        values = [torch.as_tensor(item[name]) for item in items]
        return torch.stack([F.pad(one, (0, self.limit - one.shape[-1]), value=padding) for one in values])

    def _messages(self, row: Row) -> list[Message]:
        """Those of the row's conversation; or its prompt, formatted, with the response to it."""
        config, has_media = self.config, self.processor is not None
        if row.get(config.messages_key) is not None:
            return build_conversation(row[config.messages_key], has_media)
        response = row.get(config.response_key)
        if row.get(config.prompt_key) is None or not isinstance(response, str):
            raise BadRowError(
                f"there must be messages in column `{config.messages_key}` (`data.messages_key`), or a prompt"
                f" in `{config.prompt_key}` (`data.prompt_key`) and its response, a text, in"
                f" `{config.response_key}` (`data.response_key`); the row has {sorted(row)}"
            )
        prompt = build_messages(row[config.prompt_key], row, self.prompt_format, has_media)
        return [*prompt, *build_conversation([{"role": "assistant", "content": response}], has_media)]

    def _made(self, row: Row, rendered: Rendered, shape: MediaShape | None) -> Item:
        assert isinstance(rendered, RenderedConversation), "made by `render`"
        ids, is_trained = rendered.raw_ids, rendered.is_trained
        if shape is not None:
            ids, is_trained = self._expanded(ids, is_trained, shape)
        if len(ids) > self.limit:
            raise BadRowError(
                f"the conversation has {len(ids)} tokens, `data.max_length` is {self.limit}: raise it, or set"
                " `data.filter_overlong_prompts=true`"
            )
        input_ids = torch.tensor(ids, dtype=torch.int64)  # (L,)
        return {
            "input_ids": input_ids,
            "is_trained": torch.tensor(is_trained, dtype=torch.int64),
            "position_ids": self._positions(input_ids, shape),
            "multi_modal_data": media_data(rendered.media),
        }

    def _expanded(
        self, ids: list[int], is_trained: list[bool], shape: MediaShape
    ) -> tuple[list[int], list[bool]]:
        """Tokens for the media, which stand nowhere among those that are learned: these are only moved."""
        pairs = list(zip(ids, is_trained, strict=True))
        learned = iter([token for token, is_so in pairs if is_so])
        hidden = [HIDDEN if is_so else token for token, is_so in pairs]
        expanded = expand_prompt(hidden, self.processor, shape)
        moved = [token == HIDDEN for token in expanded]
        return [next(learned) if token == HIDDEN else token for token in expanded], moved

    def _check_columns(self, option: str) -> None:
        config = self.config
        ways = [{config.messages_key}, {config.prompt_key, config.response_key}]
        for source in self.rows.sources:
            if not any(way <= set(source.columns) for way in ways):
                raise ValueError(
                    f"`{option}`: {source.name} has neither a column `{config.messages_key}` nor"
                    f" `{config.prompt_key}` and `{config.response_key}`: it has {source.columns}; set"
                    " `data.messages_key`, or `data.prompt_key` and `data.response_key`, to some of them"
                )
        if config.format_prompt and all(
            config.messages_key in source.columns for source in self.rows.sources
        ):
            raise ValueError(
                f"`data.format_prompt` ({config.format_prompt}) has no effect on `{option}`, whose rows are"
                " conversations: leave it out, or give rows of prompt and response"
            )
