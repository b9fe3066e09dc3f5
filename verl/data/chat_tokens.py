# SPDX-License-Identifier: Apache-2.0
r"""Conversations as tokens, and which of them are learned: what the assistant wrote, and where it stopped.

    <|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n
                                                            ^^^^^^^^^^^^^^

A turn begins where the chat template ends when it asks for one (`add_generation_prompt`), which is where
sampling begins, and ends with the special token that closes it. What the template writes after that token is
not learned: no engine samples it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from verl.data.bad_rows import BadRowError
from verl.data.messages import Message

ALL, LAST = "all", "last"  # values of `data.train_turns`

Render = Callable[[Sequence[Message], bool], str]  # messages, whether to ask for an answer


class Span(NamedTuple):
    """Characters of a text, from `start` up to `stop`."""

    start: int
    stop: int


class TokenizedConversation(NamedTuple):
    """A conversation as a model reads it."""

    text: str
    ids: list[int]  # one for each image and video
    is_trained: list[bool]  # (L,)


class ConversationTokenizer:
    """Renders conversations by a chat template and marks the tokens that are learned.

    Example::

        tokenize = ConversationTokenizer(tokenizer, template=None, turns="all")
        text, ids, is_trained = tokenize([{"role": "user", ...}, {"role": "assistant", ...}])

    Args:
        tokenizer: A fast one, with a chat template.
        template: Used instead of the tokenizer's own; None is that one.
        turns: Which of the assistant's turns are learned: "all" or "last".

    Raises:
        ValueError: The tokenizer does not say where its tokens stand in the text.
    """

    def __init__(self, tokenizer: Any, template: str | None, turns: str) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"`worker.actor.model.tokenizer_path` ({tokenizer.name_or_path}) must have a fast tokenizer"
                " (`tokenizer.json`): the tokens of the assistant's turns are found by where they stand"
            )
        self.tokenizer, self.template, self.turns = tokenizer, template, turns
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = tuple(special | set(tokenizer.all_special_tokens))

    def __call__(self, messages: Sequence[Message]) -> TokenizedConversation:
        """Render and tokenize messages of which at least one is the assistant's.

        Raises:
            BadRowError: The template cannot render them, or does not write the assistant's turns in a way
                that tells what a model would have sampled.
        """
        text = self._render(messages, False)
        spans = learned_spans(messages, self._render, self._special, self.turns)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_trained = tokens_inside(encoded["offset_mapping"], spans)
        return TokenizedConversation(text, encoded["input_ids"], is_trained)

    def _render(self, messages: Sequence[Message], asks: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, add_generation_prompt=asks, tokenize=False
            )
            text.encode()  # the tokenizer speaks of types where half a character is alone
        except Exception as error:  # the template is code of its own
            raise BadRowError(
                f"the chat template cannot render {len(messages)} messages of the conversation: {error}"
            ) from error
        return text


def learned_spans(
    messages: Sequence[Message], render: Render, special_tokens: tuple[str, ...], turns: str
) -> list[Span]:
    """Where in the rendered conversation the turns that are learned stand.

    Args:
        messages: Of a conversation.
        render: The chat template; called with messages and whether it asks for an answer after them.
        special_tokens: One of these ends each turn.
        turns: "all" of the assistant's, or the "last" one.

    Raises:
        BadRowError: A turn does not begin where the template asks for one, is written otherwise once other
            messages follow, or is not closed by a special token.
    """
    text = render(messages, False)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for number in numbers if turns == ALL else numbers[-1:]:
        asked, answered = render(messages[:number], True), render(messages[: number + 1], False).rstrip()
        if not text.startswith(answered):
            raise BadRowError(
                f"the chat template writes message {number}, of the assistant, otherwise once other messages"
                " follow, so what was sampled is not what stands in a longer conversation: give each turn a"
                " row of its own and set `data.train_turns=last`, or choose another template by"
                " `data.override_chat_template`"
            )
        if not answered.startswith(asked):
            raise BadRowError(
                f"the chat template does not begin message {number}, of the assistant, as it asks for an"
                f" answer (it ends in {asked[-40:]!r} when it asks): choose another template by"
                " `data.override_chat_template`"
            )
        if not answered.endswith(special_tokens):
            raise BadRowError(
                f"the chat template ends message {number}, of the assistant, with {answered[-20:]!r} and not"
                " with a special token, so a model would not learn where to stop: choose another template by"
                " `data.override_chat_template`"
            )
        spans.append(Span(len(asked), len(answered)))
    return spans


def tokens_inside(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[bool]:
    """Which tokens stand wholly inside one of the spans; a token of no characters stands nowhere.

    Args:
        offsets: For each token where it begins and ends in the text, in order.
        spans: In order, apart from one another.
    """
    inside = []
    remaining = iter(spans)
    span = next(remaining, None)
    for start, stop in offsets:
        while span is not None and start >= span.stop:
            span = next(remaining, None)
        inside.append(span is not None and span.start <= start < stop <= span.stop)
    return inside
