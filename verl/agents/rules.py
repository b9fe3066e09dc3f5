# SPDX-License-Identifier: Apache-2.0
"""Rules shared by all conversations of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.agents.interface import Message, Observation
from verl.agents.media import ConversationMedia
from verl.agents.parsers.interface import NO_CALLS, THOUGHT, CallFormat
from verl.agents.rendering import ObservationRenderer
from verl.agents.row import Prompt, Row
from verl.config.multi_turn import MultiTurnConfig
from verl.data.media.references import MediaData

TAIL = 8  # tokens that hold the end of a prompt's text


@dataclass(frozen=True)
class ConversationRules:
    """Properties that all conversations of a model share.

    Args:
        max_tokens: Maximum tokens of a response, with all turns, observations and media.
        max_prompt_tokens: Maximum tokens of a prompt, with media.
        media: None for a text model.
        max_prompt_images: Maximum images of all that the policy reads in a call of an agent; 0 is any number.
    """

    tokenizer: Any
    renderer: ObservationRenderer
    format: CallFormat
    schemas: Sequence[Mapping[str, Any]]
    options: MultiTurnConfig
    max_tokens: int
    max_prompt_tokens: int
    media: ConversationMedia | None = None
    max_prompt_images: int = 0

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
        """Render and tokenize a prompt that is not in the data set.

        Args:
            media: Those of the messages, by reference.
            name: That of the messages, for errors.
            tools: Schemas that the template shows instead of those of the run.

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
        """Render and tokenize a prompt that an environment gives.

        Args:
            observation: With messages.
            name: That of the messages, for errors.

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
