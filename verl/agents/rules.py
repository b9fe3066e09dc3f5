# SPDX-License-Identifier: Apache-2.0
"""Rules shared by all conversations of a model, and observations in the form its policy reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from verl.agents.interface import Message, Observation
from verl.agents.media import ConversationMedia
from verl.agents.parsers.interface import NO_CALLS, THOUGHT, CallFormat
from verl.agents.rendering import ObservationRenderer
from verl.agents.row import Prompt, Row
from verl.config.multi_turn import MultiTurnConfig
from verl.data.media.references import MediaData
from verl.models.families.interface import MediaShape

TAIL = 8  # tokens that hold the end of a prompt's text
MARK = " [...] "  # where text was cut out
NO_MEDIA = "[The model reads no images and videos: those of this answer are left out.]"


class Readable(NamedTuple):
    """An observation as the policy may read it."""

    observation: Observation
    media: MediaData = None  # by reference
    shape: MediaShape = MediaShape()
    row: Row | None = None  # of the context that its messages begin


@dataclass(frozen=True)
class ConversationRules:
    """Properties that all conversations of a model share."""

    tokenizer: Any
    renderer: ObservationRenderer
    format: CallFormat
    schemas: Sequence[Mapping[str, Any]]
    options: MultiTurnConfig
    max_tokens: int  # of a response at most, with all turns, observations and media
    max_prompt_tokens: int  # at most, with media
    media: ConversationMedia | None = None  # None for a text model
    max_prompt_images: int = 0  # of all that the policy reads in a call of an agent; 0 is any number

    @property
    def has_environment(self) -> bool:
        """Return whether an environment answers each turn, and not tools its calls."""
        return self.options.environment is not None

    @property
    def reads_calls(self) -> bool:
        """Return whether the template shows tools, whose calls are read."""
        return self.format is not NO_CALLS

    def new_row(
        self,
        messages: Sequence[Message],
        media: MediaData,
        name: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Row:
        """Render and tokenize a prompt that is not in the data set; errors call its messages `name`.

        The template shows the schemas of `tools` instead of those of the run. Media are given by reference.

        Raises:
            ValueError: The template cannot render the messages.
            TimeoutError: It takes too long.
        """
        plain = self.renderer.plain_values(messages)
        text = self.renderer.template(plain, True, name, self.renderer.plain_values(tools))
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.media is not None and media:
            media = self.media.with_order(media, token_ids)
        return Row(Prompt(token_ids, plain, media, text), self.media)

    def row_of(self, observation: Observation, name: str) -> Row:
        """Render and tokenize a prompt that an environment gives; errors call it `name`.

        Raises:
            ValueError: The template cannot render them, or the model cannot read them.
            TimeoutError: It takes too long.
        """
        assert observation.messages is not None, "the environment has a prompt"
        media = None
        if observation.images or observation.videos:
            if self.media is None:
                raise ValueError(f"{name} has images or videos, which the model cannot read")
            media, _ = self.media.of(observation)
        return self.new_row(observation.messages, media, name)

    def row_of_opening(self, opening: Observation) -> Row:
        """Return the row that a conversation with an environment begins with.

        Raises:
            ValueError: The template cannot render it, the model cannot read it, or it is too long.
        """
        name = f"the prompt of the environment `{self.options.environment}`"
        row = self.row_of(opening, name)
        length, limit = len(row.expanded_prompt), self.max_prompt_tokens
        if length > limit:
            raise ValueError(
                f"{name} has {length} tokens, `data.max_prompt_length` is {limit}: raise it, or have `reset`"
                " return less"
            )
        return row

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return a turn's text without the token that ended it."""
        end = len(token_ids) - self.renderer.is_end(token_ids[-1])
        return self.tokenizer.decode(list(token_ids[:end]), skip_special_tokens=False)

    def starts_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the template starts the next turn with a thought."""
        end = self.tokenizer.decode(list(prompt_ids[-TAIL:]), skip_special_tokens=False)
        return end.rstrip().endswith(THOUGHT)

    def readable(self, observation: Observation, before: MediaData = None) -> Readable:
        """Return an observation as the policy may read it; one that it cannot read says so and fails.

        `before` are the media of the conversation so far.
        """
        if observation.messages is not None:
            return self._with_messages(observation)
        answer = Readable(observation)
        if observation.images or observation.videos:
            answer = self._with_media(observation, before)
        text = self.renderer.plain(answer.observation.text)
        limit, side = self.options.max_tool_response_length, self.options.tool_response_truncate_side
        text = cut_text(self.tokenizer, text, limit, side)
        return answer._replace(observation=replace(answer.observation, text=text))

    def _with_messages(self, observation: Observation) -> Readable:
        name = f"a prompt of the environment `{self.options.environment}`"
        try:
            return Readable(observation, row=self.row_of(observation, name))
        except (ValueError, TimeoutError) as error:
            failure = replace(observation, text=f"Error: {error}.", failed=True, messages=None)
            return Readable(replace(failure, images=(), videos=()))

    def _with_media(self, observation: Observation, before: MediaData) -> Readable:
        without = replace(observation, images=(), videos=())
        if self.media is None:
            return Readable(replace(without, text=f"{observation.text}\n{NO_MEDIA}".lstrip()))
        try:
            media, shape = self.media.of(observation, before)
        except ValueError as error:
            return Readable(replace(without, text=f"Error: {error}.", failed=True))
        shown = replace(observation, images=media["images"], videos=media["videos"])
        return Readable(shown, media, shape)


def cut_text(tokenizer: Any, text: str, limit: int, side: str) -> str:
    """Cut out the left, middle or right of a text that has more than `limit` tokens; characters stay whole.

    The result, with a mark where text is missing, has at most `limit` tokens. If the mark does not fit, the
    start of the text remains (its end, if the left is cut out).
    """
    if len(text.encode()) <= limit:  # a token has a byte at least
        return text
    offsets = _offsets(tokenizer, text)
    if len(offsets) <= limit:
        return text
    mark = MARK if len(_offsets(tokenizer, MARK)) < limit else ""
    side = "right" if side == "middle" and not mark else side
    # Tokens at a seam may be split otherwise than before, so the result is counted and not the parts.
    for kept in range(limit, 0, -1):
        head, tail = {"left": (0, kept), "middle": (-(-kept // 2), kept // 2), "right": (kept, 0)}[side]
        cut = _head(text, offsets, head) + mark + _tail(text, offsets, tail)
        if len(_offsets(tokenizer, cut)) <= limit:
            return cut
    return mark


def _offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]


def _head(text: str, offsets: list[tuple[int, int]], count: int) -> str:
    # A character of several tokens has its own bounds as the offsets of each.
    return text[: offsets[count][0]] if count else ""


def _tail(text: str, offsets: list[tuple[int, int]], count: int) -> str:
    if not count:
        return ""
    first = len(offsets) - count
    return text[max(offsets[first][0], offsets[first - 1][1]) :]
