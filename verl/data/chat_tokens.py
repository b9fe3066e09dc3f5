# SPDX-License-Identifier: Apache-2.0
r"""Tokenize conversations and mark the tokens to train on: the assistant's text and its end token.

    <|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n
                                                            ^^^^^^^^^^^^^^

A turn starts where the chat template ends with `add_generation_prompt`, which is where sampling starts, and
ends with the special token that closes it. Text after that token is not trained: no engine samples it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from verl.data.bad_rows import BadRowError
from verl.data.chat_template import OTHER_TEMPLATE, ChatTemplate, check_shown
from verl.data.messages import Message, is_learned

Render = Callable[[Sequence[Message], bool], str]  # messages, add_generation_prompt


class ConversationTokenizer:
    """Renders conversations with a chat template and marks the tokens to train on.

    Args:
        turns: Assistant turns to train on, "all" or "last".
    """

    def __init__(self, tokenizer: Any, chat_template: ChatTemplate, turns: str) -> None:
        check_offsets(tokenizer)
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
        spans = learned_spans(messages, render, self._special, learned)
        check_shown(messages, text, partial(render, add_generation_prompt=False), learned)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return text, encoded["input_ids"], tokens_inside(encoded["offset_mapping"], spans)

    def _render(
        self, tools: Sequence[Mapping[str, Any]], messages: Sequence[Message], add_generation_prompt: bool
    ) -> str:
        name = f"{len(messages)} messages of the conversation"
        return self.chat_template(messages, add_generation_prompt, name, tools)


def check_offsets(tokenizer: Any) -> None:
    if not tokenizer.is_fast:
        raise ValueError(
            f"`worker.actor.model.tokenizer_path` ({tokenizer.name_or_path}) must have a fast tokenizer"
            " (`tokenizer.json`): the assistant's tokens are found by their offsets in the text"
        )


def learned_turns(messages: Sequence[Message], turns: str) -> list[int]:
    """Return the indices of the messages to train on; an opening of the assistant answers nothing."""
    learned = [index for index, message in enumerate(messages) if index and is_learned(message)]
    if not learned:
        raise BadRowError("no message of the assistant follows another message: there is nothing to train on")
    return learned if turns == "all" else learned[-1:]


def learned_spans(
    messages: Sequence[Message], render: Render, special_tokens: tuple[str, ...], learned: Sequence[int]
) -> list[range]:
    """Find the characters of the assistant turns to train on in the rendered conversation.

    The text must show what a model would sample for a turn, else a BadRowError is raised.
    """
    text = render(messages, False)
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
