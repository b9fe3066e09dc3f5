# SPDX-License-Identifier: Apache-2.0
"""Finished conversations as plain data, for checkpoints."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from verl.agents.interface import (
    ContextRecord,
    Observation,
    OwnPrompt,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


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
    """Undo `to_plain`."""
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
