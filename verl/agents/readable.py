# SPDX-License-Identifier: Apache-2.0
"""Observations as the policy may read them: plain texts, cut, with media that the model can read."""

from dataclasses import replace
from typing import Any, NamedTuple

from verl.agents.interface import Observation
from verl.agents.row import Row
from verl.agents.rules import ConversationRules
from verl.data.media.references import MediaData
from verl.models.families.interface import MediaShape

MARK = " [...] "  # where text was cut out
NO_MEDIA = "[The model reads no images and videos: those of this answer are left out.]"


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


class Readable(NamedTuple):
    """An observation as the policy may read it."""

    observation: Observation
    media: MediaData = None  # by reference
    shape: MediaShape = MediaShape()
    row: Row | None = None  # of the context that its messages begin


def readable(rules: ConversationRules, observation: Observation, before: MediaData = None) -> Readable:
    """Return an observation as the policy may read it; one that it cannot read says so and fails.

    Args:
        before: Media of the conversation so far.
    """
    if observation.messages is not None:
        return _with_messages(rules, observation)
    options = rules.options
    answer = Readable(observation)
    if observation.images or observation.videos:
        answer = _with_media(rules, observation, before)
    text = rules.renderer.plain(answer.observation.text)
    limit, side = options.max_tool_response_length, options.tool_response_truncate_side
    text = cut_text(rules.tokenizer, text, limit, side)
    return answer._replace(observation=replace(answer.observation, text=text))


def _with_messages(rules: ConversationRules, observation: Observation) -> Readable:
    name = f"a prompt of the environment `{rules.options.environment}`"
    try:
        return Readable(observation, row=rules.row_of(observation, name))
    except (ValueError, TimeoutError) as error:
        failure = replace(observation, text=f"Error: {error}.", failed=True, messages=None)
        return Readable(replace(failure, images=(), videos=()))


def _with_media(rules: ConversationRules, observation: Observation, before: MediaData) -> Readable:
    without = replace(observation, images=(), videos=())
    if rules.media is None:
        return Readable(replace(without, text=f"{observation.text}\n{NO_MEDIA}".lstrip()))
    try:
        media, shape = rules.media.of(observation, before)
    except ValueError as error:
        return Readable(replace(without, text=f"Error: {error}.", failed=True))
    shown = replace(observation, images=media["images"], videos=media["videos"])
    return Readable(shown, media, shape)
