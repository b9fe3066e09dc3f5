# SPDX-License-Identifier: Apache-2.0
"""The columns of the rollout store that only conversations have."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from verl.data.media.references import MediaData
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
        schemas: Tools that the policy may call, unless its contexts have their own.
        decode: Turns the tokens of a turn into text.
        keep_media: Stores media and describes each, as the column `media` of the store.
    """
    turns = item.get("turns")
    if not turns:
        return {}
    media = _Media(item.get("observation_media") or {}, keep_media)
    numbered, contexts, shown = iter(enumerate(turns)), [], []
    for number, context in enumerate(item["contexts"]):
        tools = schemas if context["tools"] is None else context["tools"]
        # Those of the first context are the prompt's.
        opening = media.next(context["num_images"], context["num_videos"]) if number else []
        contexts.append(
            {
                **{name: context[name] for name in ("start", "num_turns", "num_opening")},
                "messages": json.dumps(context["messages"]),
                "tools": json.dumps(tools),
                "media": opening,
            }
        )
        shown += [
            _turn(turn, name_of(place), item["reward_values"], token_ids, decode, media)
            for place, turn in islice(numbered, context["num_turns"])
        ]
    assert len(shown) == len(turns), "each turn belongs to a context"
    observations = [one for turn in turns for one in turn["observations"]]
    return {
        "num_turns": len(turns),
        "num_calls": sum(len(turn["calls"]) for turn in turns),
        "num_failures": sum(one["failed"] for one in observations),
        "stop_reason": item["stop_reason"],
        "contexts": contexts,
        "turns": shown,
    }


class _Media:
    """The media of a response in the order in which the policy read them."""

    def __init__(self, media: Mapping[str, Any], keep: KeepMedia) -> None:
        self._left = {name: iter(media.get(name) or ()) for name in ("images", "videos")}
        self._keep = keep

    def next(self, num_images: int, num_videos: int) -> list[dict[str, Any]]:
        counts = {"images": num_images, "videos": num_videos}
        return list(self._keep({name: list(islice(self._left[name], counts[name])) for name in counts}))


def _turn(
    turn: Mapping[str, Any],
    reward: str,
    rewards: Mapping[str, float],
    token_ids: Sequence[int],
    decode: Decode,
    media: _Media,
) -> dict[str, Any]:
    return {
        **{name: turn[name] for name in ("start", "stop", "seconds", "is_shown")},
        "reward": rewards.get(reward, turn["reward"]),  # of the reward function, if it rewards turns
        "text": decode(list(token_ids[turn["start"] : turn["stop"]])),
        "calls": [
            {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
            for call in turn["calls"]
        ],
        "observations": list(_observations(turn, media)),
    }


def _observations(turn: Mapping[str, Any], media: _Media) -> Iterator[dict[str, Any]]:
    for one in turn["observations"]:
        yield {
            "text": one["text"],
            "failed": one["failed"],
            "seconds": one["seconds"],
            "num_media": one["images"] + one["videos"],
            # Media of others are not part of the row.
            "media": media.next(one["images"], one["videos"]) if turn["is_shown"] else [],
        }
