# SPDX-License-Identifier: Apache-2.0
"""The tokens of a conversation in two forms: for the engine, and for training.

The engine takes one placeholder for each image or video, training the tokens of each (`MediaFamily.expand`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from verl.agents.interface import Message, OwnPrompt
from verl.agents.media import ConversationMedia, as_lists, join_media, join_shapes
from verl.data.media.loader import kinds_in_order
from verl.data.media.references import MediaData
from verl.models.families.interface import MediaShape
from verl.models.mixture.routes import join_routes


class Prompt(NamedTuple):
    """The prompt of a conversation, as the data set renders it."""

    token_ids: list[int]  # one placeholder for each image or video
    messages: Sequence[Message]
    media: MediaData = None
    text: str | None = None  # if it was rendered here, and is not that of the data set's row


class SampledTurn(NamedTuple):
    """A turn as an engine sampled it."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str  # "length" if a limit cut it off
    versions: Sequence[int] = ()  # of the weights that sampled each token, where they may change in a turn
    # (tokens, L, k) experts of the row so far and the turn; a token keeps the experts of an earlier turn
    routes: Tensor | None = None


class Piece(NamedTuple):
    """The tokens of observations."""

    token_ids: list[int]  # one placeholder for each image or video
    expanded: list[int]
    media: MediaData = None
    shape: MediaShape = MediaShape()


class Row:
    """A prompt and its response so far; a text model has no reader of media."""

    def __init__(self, prompt: Prompt, reader: ConversationMedia | None) -> None:
        self.prompt, self._reader = prompt, reader
        self.token_ids = list(prompt.token_ids)  # the engine's, of prompt and response
        self.response: list[int] = []  # expanded
        self.log_probs: list[float] = []  # 0 for tokens that were not sampled
        self.is_sampled: list[bool] = []
        self.versions: list[int] = []  # of the weights that sampled each token; 0 for other tokens
        self.routes: Tensor | None = None  # (tokens, L, k) experts of the first tokens, the prompt's too
        self.added: MediaData = None  # media of observations
        self._added_shape = MediaShape()

    @property
    def media(self) -> MediaData:
        return join_media(self.prompt.media, self.added)

    def add_sampled(self, turn: SampledTurn) -> None:
        self.routes = join_routes(self.routes, turn.routes)
        self._add(turn.token_ids, turn.token_ids, turn.log_probs, turn.versions, is_sampled=True)

    def add_piece(self, piece: Piece) -> None:
        self._add(piece.token_ids, piece.expanded, [0.0] * len(piece.expanded), (), is_sampled=False)
        self.added = join_media(self.added, piece.media)
        self._added_shape = join_shapes(self._added_shape, piece.shape)

    def piece(self, token_ids: list[int], media: MediaData, shape: MediaShape) -> Piece:
        """Return the piece of these tokens, expanded as after the row so far."""
        if self._reader is None or media is None:
            return Piece(token_ids, token_ids)
        order = kinds_in_order(self.media)
        expanded = self._reader.expand(token_ids, self.token_ids[-1], shape, self._shape, order)
        return Piece(token_ids, expanded, self._reader.with_order(media, token_ids), shape)

    def own_prompt(self) -> OwnPrompt | None:
        """Return the prompt; None if it is that of the data set's row."""
        if self.prompt.text is None:
            return None
        tokens, messages = self.expanded_prompt, tuple(self.prompt.messages)
        positions = self.all_positions()[..., : len(tokens)]
        return OwnPrompt(tokens, positions, messages, self.prompt.text, as_lists(self.prompt.media))

    def all_positions(self) -> Tensor:
        """Return the positions (P + R,) or (4, P + R) of prompt and response."""
        tokens = torch.tensor([*self.expanded_prompt, *self.response], dtype=torch.int64)
        positions = None if self._reader is None else self._reader.position_ids(tokens, self._shape)
        return torch.arange(len(tokens)) if positions is None else positions

    @cached_property
    def expanded_prompt(self) -> list[int]:
        """The tokens of the prompt, with those of its media."""
        if self._reader is None:
            return list(self.prompt.token_ids)
        return self._reader.loader.expand(list(self.prompt.token_ids), self._prompt_shape)

    @property
    def _shape(self) -> MediaShape:
        return join_shapes(self._prompt_shape, self._added_shape)

    @cached_property
    def _prompt_shape(self) -> MediaShape:
        return MediaShape() if self._reader is None else self._reader.loader.measure(self.prompt.media)

    def _add(
        self,
        token_ids: Sequence[int],
        expanded: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
        is_sampled: bool,
    ) -> None:
        self.token_ids += token_ids
        self.response += expanded
        self.log_probs += log_probs
        self.is_sampled += [is_sampled] * len(expanded)
        self.versions += versions or [0] * len(expanded)
