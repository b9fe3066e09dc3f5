# SPDX-License-Identifier: Apache-2.0
"""Observations as the policy may read them: plain texts, cut, with media that the model can read."""

from dataclasses import replace
from typing import NamedTuple

from verl.agents.interface import Observation
from verl.agents.long_text import cut_text
from verl.agents.row import Row
from verl.agents.rules import ConversationRules
from verl.data.media.loader import MediaData
from verl.models.families.interface import MediaShape

NO_MEDIA = "[The model reads no images and videos: those of this answer are left out.]"


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
