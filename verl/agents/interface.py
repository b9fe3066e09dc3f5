# SPDX-License-Identifier: Apache-2.0
"""The parts of a conversation between the policy and the world: calls, observations, turns.

Token in, token out: a turn keeps the tokens that the engine sampled; its text is never tokenized again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

Reference = Any  # of an image or video: a path, bytes, or a dictionary with one of them, as in a row
Message = dict[str, Any]  # `role` and `content`, as a chat template reads it
MAX_DEPTH = 64  # of lists and objects within each other: pickle, json and templates recurse into them


def unfit_part(value: Any, limit: int = MAX_DEPTH) -> str | None:
    """Return what a value has that JSON cannot hold or that is too deep, if anything; does not recurse."""
    level = [value]
    for _ in range(limit + 1):
        if any(isinstance(one, float) and not math.isfinite(one) for one in level):
            return "a number that is not finite"
        containers = [one for one in level if isinstance(one, Mapping | list | tuple)]
        level = [part for one in containers for part in (one.values() if isinstance(one, Mapping) else one)]
    return f"over {limit} levels of lists and objects" if containers else None


class StopReason(StrEnum):
    """Why a conversation ended."""

    STOP = "stop"  # the policy made no call, or its agent returned
    DONE = "done"  # a tool or the environment said so
    FAILED = "tool"  # a tool or the environment failed
    LENGTH = "length"  # this limit and the others cut it off
    TURNS = "turns"
    SECONDS = "seconds"
    IMAGES = "images"

    @property
    def finish_reason(self) -> str:
        """That of the response: "stop", or "length" if the conversation was cut off."""
        return "stop" if self in (StopReason.STOP, StopReason.DONE) else "length"


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None  # why it cannot be made, for a call that the parser could not read


@dataclass(frozen=True)
class Observation:
    """An answer of a tool or an environment."""

    text: str = ""
    images: Sequence[Any] = ()  # PIL images, paths, bytes, or dictionaries
    videos: Sequence[Any] = ()  # paths, bytes, or dictionaries
    reward: float | None = None  # of the turn that it answers
    done: bool = False  # the conversation ends here, without another turn of the policy
    # of an environment, instead of text and media: what the policy reads from here on, and nothing before it
    messages: Sequence[Message] | None = None
    failed: bool = False  # the tool raised, hung or died; `text` says so
    seconds: float | None = field(default=None, compare=False)  # of the tool's work; None if none was called


class CallRefusedError(ValueError):
    """Raised by a tool for a mistake of the policy: the message is the answer, and the tool did not fail."""


@dataclass(frozen=True)
class AgentResult(Observation):
    """The end of an agent: `reward` is that of the whole conversation, given to its last turn."""

    turn_rewards: tuple[float | None, ...] = ()  # of the policy's turns, in the order of the calls


@dataclass(frozen=True)
class Turn:
    """A turn of the policy and what followed."""

    start: int  # among the tokens of the response
    stop: int
    calls: tuple[ToolCall, ...] = ()
    observations: tuple[Observation, ...] = ()  # to the calls in order, or the environment's only one
    seconds: float = 0.0  # from the end of the turn to the last observation
    reward: float | None = None  # the sum of the observations'; None without any


@dataclass(frozen=True)
class OwnPrompt:
    """A prompt that does not come from the row of the data set."""

    token_ids: list[int]  # with the tokens of media
    position_ids: Any  # (P,) or (4, P) int64
    messages: tuple[Message, ...]
    text: str
    media: Mapping[str, list[Reference]] = field(default_factory=dict)


@dataclass(frozen=True)
class ContextRecord:
    """Messages as the policy read them, from the first one on, with its turns as it wrote them.

    A turn with `weight` 0 is not learned here: another context has it, the agent wrote it, or it was cut off.
    """

    messages: tuple[Message, ...]
    num_opening: int  # messages before the policy's first turn
    num_turns: int
    num_images: int = 0  # of the messages before the first turn
    num_videos: int = 0
    tools: Sequence[Mapping[str, Any]] | None = None  # schemas; None: those of the run


@dataclass(frozen=True)
class Trajectory:
    """A finished conversation, in addition to the tokens of its response."""

    is_sampled: list[bool]  # of each token: False on those of observations
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]  # the prompt's and those of the conversation
    media: Mapping[str, list[Reference]] = field(default_factory=dict)  # images and videos of observations
    position_ids: Any = None  # (R,) or (4, R) int64 for its R tokens; None counts on from the prompt's last
    is_masked: bool = False  # it takes no part in training: a tool failed, and `on_tool_error` says so
    stop_reason: StopReason = StopReason.STOP
    prompt: OwnPrompt | None = None  # None: that of the row
    # where the policy reads a new context and nothing before it, among the tokens of the response: such a
    # context is given there as a whole, as tokens that were not sampled
    context_starts: tuple[int, ...] = ()
    contexts: tuple[ContextRecord, ...] = ()  # in the order of their turns

    def plain_contexts(self) -> list[dict[str, Any]]:
        """Contexts as plain data, with the number of their first token in the response."""
        starts = (0, *self.context_starts)
        return [{"start": start, **vars(one)} for start, one in zip(starts, self.contexts, strict=False)]

    def plain_turns(self) -> list[dict[str, Any]]:
        """Turns as plain data, for files and people; without media, of which only the numbers are kept.

        `is_shown`: the observations became part of the conversation, which did not end before them.
        """
        ends = {*self.context_starts, len(self.is_sampled)}
        return [
            {
                **vars(turn),
                "calls": [{"name": call.name, "arguments": call.arguments} for call in turn.calls],
                "observations": [
                    {
                        "text": one.text,
                        "images": len(one.images),
                        "videos": len(one.videos),
                        "failed": one.failed,
                        "seconds": one.seconds,
                    }
                    for one in turn.observations
                ],
                "is_shown": turn.stop not in ends,
            }
            for turn in self.turns
        ]


def to_plain(trajectory: Trajectory) -> dict[str, Any]:
    """Return a conversation as dictionaries, lists and values, without the messages of observations.

    Those began further contexts, which are in the row already.
    """
    turns = tuple(
        replace(turn, observations=tuple(replace(one, messages=None) for one in turn.observations))
        for turn in trajectory.turns
    )
    return asdict(replace(trajectory, turns=turns)) | {"stop_reason": trajectory.stop_reason.value}


def from_plain(plain: Mapping[str, Any]) -> Trajectory:
    turns = tuple(
        Turn(
            **{
                **turn,
                "calls": tuple(ToolCall(**call) for call in turn["calls"]),
                "observations": tuple(Observation(**one) for one in turn["observations"]),
            }
        )
        for turn in plain["turns"]
    )
    prompt = plain["prompt"] and OwnPrompt(**plain["prompt"])
    contexts = tuple(ContextRecord(**one) for one in plain["contexts"])
    read = {"turns": turns, "prompt": prompt, "contexts": contexts}
    return Trajectory(**{**plain, **read, "stop_reason": StopReason(plain["stop_reason"])})
