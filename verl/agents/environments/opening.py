# SPDX-License-Identifier: Apache-2.0
"""Convert an environment's messages to an `Observation` of plain values, checked before it is sent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from verl.agents.interface import Message, Observation, unfit_part
from verl.agents.tools.answers import AnswerLimits, BadAnswerError, as_observation, plain_text
from verl.data.messages import ROLES

MAX_CHARACTERS = 1 << 22  # of all texts; tokens limit a prompt before, unless it is out of all proportion
WHOLE = AnswerLimits(MAX_CHARACTERS, "middle")  # a longer one is refused, not cut
KINDS = ("image", "video")
SOURCES = ("bytes", "path")
FORM = 'a list of messages like {"role": "user", "content": ...}, a text, an image, an `Observation`, or None'


def as_opening(returned: Any) -> Observation:
    """Turn messages, a text, an image, a list of both, an `Observation` or None into plain messages.

    Media leave the messages, in which `{"type": "image"}` remains, for `images` and `videos` in their order.

    Raises:
        BadAnswerError: It is none of these, or too large.
    """
    if returned is None:
        return Observation()
    messages = _messages_of(returned)
    media: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    plain = tuple(_plain_message(number, message, media) for number, message in enumerate(messages))
    if plain[-1]["role"] == "assistant":
        raise BadAnswerError("messages that end with the assistant's, before its turn")
    size = sum(len(text) for message in plain for text in _texts(message))
    if size > MAX_CHARACTERS:
        raise BadAnswerError(f"messages of {size} characters, at most {MAX_CHARACTERS}")
    checked = as_observation(Observation(images=media["image"], videos=media["video"]), WHOLE)
    return replace(checked, messages=plain)


def as_step(returned: Any, limits: AnswerLimits) -> Observation:
    """Turn what `step` returned into plain values, the messages of a new context too.

    Raises:
        BadAnswerError: It is not an answer, or too large.
    """
    if not isinstance(returned, Observation) or returned.messages is None:
        return as_observation(returned, limits)
    if returned.text or returned.images or returned.videos:
        raise BadAnswerError("an Observation with `messages` and in addition a text, images or videos")
    opening = as_opening(returned.messages)
    plain = as_observation(replace(returned, messages=None), limits)
    return replace(plain, images=opening.images, videos=opening.videos, messages=opening.messages)


def _messages_of(returned: Any) -> Sequence[Any]:
    if isinstance(returned, Observation):
        if returned.done or returned.failed:
            raise BadAnswerError("a beginning that is `done` or `failed`: raise an error instead")
        return [_message_of(returned)] if returned.messages is None else _messages_of(returned.messages)
    if isinstance(returned, str):
        return [{"role": "user", "content": returned}]
    if isinstance(returned, Mapping):
        return [returned]
    items = returned if isinstance(returned, list | tuple) else [returned]
    if items and all(isinstance(item, Mapping) for item in items):
        return items
    if items and all(isinstance(item, str | Image.Image) for item in items):
        return [{"role": "user", "content": [_part(item) for item in items]}]
    raise BadAnswerError(f"{type(returned).__name__}, not {FORM}")


def _message_of(observation: Observation) -> Message:
    parts: list[Any] = [_part(observation.text)] if observation.text else []
    parts += [{"type": "image", "image": image} for image in observation.images]
    parts += [{"type": "video", "video": video} for video in observation.videos]
    return {"role": "user", "content": parts or ""}


def _part(item: str | Image.Image) -> dict[str, Any]:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    return {"type": "image", "image": item}


def _plain_message(number: int, message: Mapping[str, Any], media: dict[str, list[Any]]) -> Message:
    content = message.get("content")
    if message.get("role") not in ROLES or not isinstance(content, str | list | tuple):
        raise BadAnswerError(
            f"message {number} without a `role` of {ROLES} and a `content` of text or parts: {message!r:.100}"
        )
    others = {key: value for key, value in message.items() if key not in ("role", "content")}
    try:
        others = json.loads(json.dumps(others))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadAnswerError(f"message {number} with values that are not of JSON ({error})") from error
    if unfit := unfit_part(others):
        raise BadAnswerError(f"message {number} with {unfit}")
    plain: Any = plain_text(content) if isinstance(content, str) else _plain_parts(number, content, media)
    return {"role": plain_text(message["role"]), "content": plain, **others}


def _plain_parts(
    number: int, parts: Sequence[Any], media: dict[str, list[Any]]
) -> str | list[dict[str, str]]:
    """Return parts without payload; texts only become one text."""
    plain: list[dict[str, str]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            plain.append({"type": "text", "text": plain_text(part.get("text"))})
        elif kind in KINDS:
            media[kind].append(_payload(number, kind, part))
            plain.append({"type": kind})
        else:
            raise BadAnswerError(f"a part of message {number} that is no text, image or video: {part!r:.100}")
    if all(part["type"] == "text" for part in plain):
        return "".join(part["text"] for part in plain)
    return plain


def _payload(number: int, kind: str, part: Mapping[str, Any]) -> Any:
    given = [part[key] for key in (kind, *SOURCES) if part.get(key) is not None]
    if len(given) != 1:
        raise BadAnswerError(f"{kind} in message {number} must have one of {[kind, *SOURCES]}: {part!r:.100}")
    return given[0]


def _texts(message: Message) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part.get("text", "") for part in content]
