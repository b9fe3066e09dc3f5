# SPDX-License-Identifier: Apache-2.0
"""The columns of the rollout store that only conversations have."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from verl.data.media.loader import MediaData
from verl.rewards.turns import name_of

Decode = Callable[[list[int]], str]
KeepMedia = Callable[[MediaData], Iterable[dict[str, Any]]]


def conversation_columns(
    item: Mapping[str, Any],
    token_ids: Sequence[int],
    schemas: Sequence[Mapping[str, Any]],
    decode: Decode,
    keep_media: KeepMedia,
) -> dict[str, Any]:
    """Return the columns of a conversation; none for a response of one turn without tools.

    Args:
        item: A row of the batch, with the columns of conversations if it has any.
        token_ids: All tokens of the response.
        schemas: Tools that the policy may call.
        decode: Turns the tokens of a turn into text.
        keep_media: Stores media and describes each, as the column `media` of the store.
    """
    turns = item.get("turns")
    if not turns:
        return {}
    observations = [one for turn in turns for one in turn["observations"]]
    contexts = item.get("context_starts") or ()
    media = {} if contexts else item.get("observation_media") or {}  # those of contexts are no observation's
    pictures, films = (iter(media.get(name) or ()) for name in ("images", "videos"))
    return {
        "num_turns": len(turns),
        "num_calls": sum(len(turn["calls"]) for turn in turns),
        "num_failures": sum(one["failed"] for one in observations),
        "stop_reason": item["stop_reason"],
        "num_contexts": 1 + len(contexts),
        "conversation": json.dumps(item["conversation_messages"]),
        "tools": json.dumps(schemas),
        "turns": [
            {
                **{name: turn[name] for name in ("start", "stop", "seconds", "is_shown")},
                # of the reward function, if it rewards turns
                "reward": item["reward_values"].get(name_of(number), turn["reward"]),
                "text": decode(list(token_ids[turn["start"] : turn["stop"]])),
                "calls": [
                    {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
                    for call in turn["calls"]
                ],
                "observations": list(_observations(turn, pictures, films, keep_media)),
            }
            for number, turn in enumerate(turns)
        ],
    }


def _observations(
    turn: Mapping[str, Any], pictures: Iterator[Any], films: Iterator[Any], keep_media: KeepMedia
) -> Iterator[dict[str, Any]]:
    for one in turn["observations"]:
        shown = {"images": [], "videos": []}
        if turn["is_shown"]:  # media of others are not part of the row
            shown = {
                "images": list(islice(pictures, one["images"])),
                "videos": list(islice(films, one["videos"])),
            }
        yield {
            "text": one["text"],
            "failed": one["failed"],
            "seconds": one["seconds"],
            "num_media": one["images"] + one["videos"],
            "media": list(keep_media(shown)),
        }
