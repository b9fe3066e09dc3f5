# SPDX-License-Identifier: Apache-2.0
r"""Conversations to train on: chat messages with the assistant's turns, or a prompt and its response.

A batch has the keys that the policy update reads: `responses` are all tokens after the first one, and
`loss_mask` marks the assistant's, which are its text and its end token:

    <|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n
                                                            ^^^^^^^^^^^^^^

A turn starts where the chat template ends with `add_generation_prompt`, which is where sampling starts, and
ends with the special token that closes it. Text after that token is not trained: no engine samples it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import compress
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.data.bad_rows import BadRowError
from verl.data.chat_template import OTHER_TEMPLATE, ChatTemplate, check_shown
from verl.data.columns import check_conversation_columns
from verl.data.dataset import Item, Rendered, RowDataset
from verl.data.messages import Message, conversation_of, is_learned, media_of, tools_of
from verl.data.plain_files import Row
from verl.models.families.interface import MediaShape
from verl.utils.plain_data import objects

Render = Callable[[Sequence[Message], bool], str]  # messages, add_generation_prompt
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
        if not tokenizer.is_fast:
            raise ValueError(
                f"`worker.actor.model.tokenizer_path` ({tokenizer.name_or_path}) must have a fast tokenizer"
                " (`tokenizer.json`): the assistant's tokens are found by their offsets in the text"
            )
        super().__init__(files, tokenizer, processor, config, **options)

    @cached_property
    def _tokenize(self) -> "ConversationTokenizer":
        return ConversationTokenizer(self.tokenizer, self.chat_template, self.config.train_turns)

    def render(self, row: Row) -> Rendered:
        messages = conversation_of(row, self.config, self.prompt_format, self.kinds)
        media = media_of(row, messages, self.config, self.kinds)
        text, ids, is_trained = self._tokenize(messages, tools_of(row, self.config.tools_key))
        if self.processor is not None:
            learned = set(compress(ids, is_trained))
            if learned & self._media.loader.family.placeholders(self.processor).keys():
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


class ConversationTokenizer:
    """Renders conversations with a chat template and marks the tokens to train on.

    Args:
        turns: Assistant turns to train on, "all" or "last".
    """

    def __init__(self, tokenizer: Any, chat_template: ChatTemplate, turns: str) -> None:
        self.tokenizer, self.chat_template, self.turns = tokenizer, chat_template, turns
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = tuple(special | set(tokenizer.all_special_tokens))

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[int], list[bool]]:
        """Return text, tokens (one for each image and video), and for each token whether to train on it."""
        render = partial(self._render, tools)
        text = render(messages, False)
        learned = learned_turns(messages, self.turns)
        spans = learned_spans(messages, text, render, self._special, learned)
        check_shown(messages, text, partial(render, add_generation_prompt=False), learned)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return text, encoded["input_ids"], tokens_inside(encoded["offset_mapping"], spans)

    def _render(
        self, tools: Sequence[Mapping[str, Any]], messages: Sequence[Message], add_generation_prompt: bool
    ) -> str:
        name = f"{len(messages)} messages of the conversation"
        return self.chat_template(messages, add_generation_prompt, name, tools)


def learned_turns(messages: Sequence[Message], turns: str) -> list[int]:
    """Return the indices of the messages to train on; an opening of the assistant answers nothing."""
    learned = [index for index, message in enumerate(messages) if index and is_learned(message)]
    if not learned:
        raise BadRowError("no message of the assistant follows another message: there is nothing to train on")
    return learned if turns == "all" else learned[-1:]


def learned_spans(
    messages: Sequence[Message],
    text: str,
    render: Render,
    special_tokens: tuple[str, ...],
    learned: Sequence[int],
) -> list[range]:
    """Find the characters of the assistant turns to train on in `text`, the rendered conversation.

    The text must show what a model would sample for a turn, else a BadRowError is raised.
    """
    spans = []
    for index in learned:
        asked, answered = render(messages[:index], True), render(messages[: index + 1], False).rstrip()
        message = f"message {index}, of the assistant,"
        if not text.startswith(answered):
            raise BadRowError(
                f"the chat template renders {message} differently when other messages follow, so a longer"
                " conversation does not show what was sampled: put each turn into its own row and set"
                f" `data.train_turns=last`, or {OTHER_TEMPLATE}"
            )
        if not answered.startswith(asked):
            prompt = f"its generation prompt (which ends in {asked[-40:]!r})"
            raise BadRowError(f"the chat template does not start {message} with {prompt}: {OTHER_TEMPLATE}")
        if not answered.endswith(special_tokens):
            raise BadRowError(
                f"the chat template ends {message} with {answered[-20:]!r} and not with a special token, so a"
                f" model would not learn where to stop: {OTHER_TEMPLATE}"
            )
        spans.append(range(len(asked), len(answered)))
    return spans


def tokens_inside(offsets: Sequence[tuple[int, int]], spans: Sequence[range]) -> list[bool]:
    """Return for each token whether it lies within a span; empty tokens never do. Both are in order."""
    inside = []
    remaining = iter(spans)
    span = next(remaining, None)
    for start, stop in offsets:
        while span is not None and start >= span.stop:
            span = next(remaining, None)
        inside.append(span is not None and span.start <= start < stop <= span.stop)
    return inside
