# SPDX-License-Identifier: Apache-2.0
"""Contexts of a conversation, and the row that they form.

A context is all that the policy reads from its first message on. Later contexts follow in the response of the
row, each as a whole: an environment replaces what the policy has read, or an agent does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import torch

from verl.agents.endpoint.chat_messages import ChatMessage
from verl.agents.endpoint.requests import ChatRequest
from verl.agents.interface import ContextRecord, Message, Observation, StopReason, Trajectory, Turn
from verl.agents.media import as_lists, join_media
from verl.agents.row import Piece, Row
from verl.data.media.references import MediaData
from verl.models.mixture.routes import extend_routes

UNLEARNED = {"weight": 0}


@dataclass(eq=False)
class Context:
    """Messages that the policy read from their first on, with its turns."""

    row: Row
    messages: list[Message] = field(default_factory=list)  # as templates were given them
    num_opening: int = 0  # messages before the first turn
    turns: list[Turn] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] | None = None  # None: those of the run
    is_first: bool = False  # its prompt is that of the row

    def record(self) -> ContextRecord:
        images, videos = (len((self.row.prompt.media or {}).get(name) or ()) for name in ("images", "videos"))
        return ContextRecord(
            tuple(self.messages), self.num_opening, len(self.turns), images, videos, self.tools
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that it takes of the response."""
        return len(self.row.response) + (0 if self.is_first else len(self.row.expanded_prompt))


class AnsweredCall(NamedTuple):
    """The call of an agent that a turn answered."""

    number: int  # among those of the conversation
    ended_at: float
    tool_call_ids: tuple[str, ...]


@dataclass(eq=False)
class AgentContext(Context):
    """A context that calls of an agent continue."""

    chat: list[ChatMessage] = field(default_factory=list)  # as the agent gave them, and the last answer
    calls: list[AnsweredCall] = field(default_factory=list)  # of the turns
    is_busy: bool = False  # a call that continues it is open

    def add_turn(self, given: Sequence[Message], text: str, is_whole: bool) -> None:
        """Append rendered messages and the text of the turn that follows them."""
        if not self.messages:
            self.num_opening = len(given)
            given = [one | UNLEARNED if one["role"] == "assistant" else one for one in given]
        turn = {"role": "assistant", "content": text}
        self.messages += [*given, turn if is_whole else turn | UNLEARNED]

    def is_continued_by(self, request: ChatRequest) -> bool:
        count = len(self.chat)
        new = request.messages[count:]
        return (
            bool(self.turns)
            and not self.is_busy
            and bool(new)
            and not any(one.message["role"] == "assistant" for one in new)
            and self.tools == request.tools
            and all(
                old.digest == given.digest
                for old, given in zip(self.chat, request.messages[:count], strict=True)
            )
        )


@dataclass(eq=False)
class OpenCall:
    """A call that the engine samples."""

    number: int  # among those of the conversation
    request: ChatRequest
    context: AgentContext
    piece: Piece | None  # the tokens of its new messages; None if it began its context
    max_tokens: int
    at: float
    rendered: Sequence[Message] = ()  # the new messages

    @property
    def token_ids(self) -> list[int]:
        """Tokens for the engine, with a placeholder for each image or video."""
        return [*self.context.row.token_ids, *(self.piece.token_ids if self.piece else ())]

    @property
    def media(self) -> MediaData:
        return join_media(self.context.row.media, self.piece.media if self.piece else None)

    @property
    def num_observed(self) -> int:
        """Tokens that it takes of the response, without the sampled ones."""
        if self.piece is not None:
            return len(self.piece.expanded)
        return 0 if self.context.is_first else len(self.context.row.expanded_prompt)


class FinishedConversation(NamedTuple):
    """The response of a conversation: all turns and the observations between them."""

    token_ids: list[int]  # with the tokens of media
    log_probs: list[float]  # 0 for tokens that were not sampled
    finish_reason: str  # "stop", or "length" if a limit cut it off
    trajectory: Trajectory
    versions: list[int]  # of the weights that sampled each token; 0 for tokens that were not sampled
    routes: torch.Tensor | None = None  # (tokens, L, k) experts of the prompt and the response


def joined_response(
    contexts: Sequence[Context],
    messages: tuple[Message, ...],
    stop_reason: StopReason,
    finish_reason: str,
    *,
    is_masked: bool,
) -> FinishedConversation:
    """Join contexts to the response of a row, whose prompt is that of the first; see `Trajectory`."""
    first, *others = contexts
    row, parts = first.row, [context.row for context in contexts]
    starts, turns, length = [], list(first.turns), len(row.response)
    for context in others:
        starts.append(length)
        length += len(context.row.expanded_prompt)
        turns += [replace(turn, start=turn.start + length, stop=turn.stop + length) for turn in context.turns]
        length += len(context.row.response)
    trajectory = Trajectory(
        is_sampled=_joined(parts, lambda part: part.is_sampled, False),
        turns=tuple(turns),
        messages=messages,
        media=as_lists(reduce(join_media, (part.media for part in parts[1:]), row.added)),
        position_ids=None if row.added is None and not others else _positions(parts),
        is_masked=is_masked,
        stop_reason=stop_reason,
        prompt=row.own_prompt(),
        context_starts=tuple(starts),
        contexts=tuple(context.record() for context in contexts),
    )
    return FinishedConversation(
        _joined(parts, lambda part: part.response, None),
        _joined(parts, lambda part: part.log_probs, 0.0),
        finish_reason,
        trajectory,
        _joined(parts, lambda part: part.versions, 0),
        _routes(parts),
    )


def empty_response(
    tokenizer: Any, messages: tuple[Message, ...], reason: StopReason, failures: tuple[Observation, ...]
) -> FinishedConversation:
    """Return the response of a conversation without a turn of the policy: a token that does not count.

    It takes the place of the turn, which what failed follows.
    """
    token = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    turn = Turn(0, 1, observations=failures)
    answer = {"role": "assistant", "content": ""} | UNLEARNED
    context = ContextRecord((*messages, answer), len(messages), 1)
    trajectory = Trajectory(
        [False], (turn,), messages, is_masked=True, stop_reason=reason, contexts=(context,)
    )
    return FinishedConversation([token], [0.0], reason.finish_reason, trajectory, [0])


def _joined(parts: Sequence[Row], values: Callable[[Row], list[Any]], filler: Any) -> list[Any]:
    """Join the values of each token; the prompts of further contexts have `filler`, None: their tokens."""
    joined = list(values(parts[0]))
    for part in parts[1:]:
        prompt = part.expanded_prompt
        joined += [*(prompt if filler is None else [filler] * len(prompt)), *values(part)]
    return joined


def _routes(parts: Sequence[Row]) -> torch.Tensor | None:
    known = [
        extend_routes(part.routes, len(part.expanded_prompt) + len(part.response))
        for part in parts
        if part.routes is not None
    ]
    return torch.cat(known) if len(known) == len(parts) else None


def _positions(parts: Sequence[Row]) -> torch.Tensor:
    """Return the positions of the response; those of each further context begin at zero."""
    first, *others = (part.all_positions() for part in parts)
    return torch.cat([first[..., len(parts[0].expanded_prompt) :], *others], dim=-1)
