# SPDX-License-Identifier: Apache-2.0
"""Convert what a tool or an environment returns to an `Observation` of plain values before it is sent.

Answers are truncated and limited; the messages of a prompt are refused if they are too long.
"""

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from PIL import Image

from verl.agents.interface import AgentResult, Message, Observation, unfit_part
from verl.config.multi_turn import MultiTurnConfig
from verl.data.messages import ROLES
from verl.rewards.turns import MAX_FLOAT32, nearest_float
from verl.utils.images import open_image, to_rgb

LONG_TOKEN = 32  # characters; few tokens are longer, so that the tokens decide what is cut of most texts
MIN_CHARACTERS = 1 << 14
MAX_PIXELS = 1 << 26  # of an image: 8192 x 8192
MAX_IMAGES = 16  # of an answer
MAX_BYTES = 32 << 20  # of all images and videos of an answer
CUT = "\n[... {} characters ...]\n"
MAX_MESSAGES = 1 << 22  # characters of a prompt; tokens limit it before, unless it is out of all proportion
KINDS = ("image", "video")
SOURCES = ("bytes", "path")
FORM = 'a list of messages like {"role": "user", "content": ...}, a text, an image, an `Observation`, or None'


class BadAnswerError(ValueError):
    """A tool returned something that is not an answer, or one that is too large."""


@dataclass(frozen=True)
class AnswerLimits:
    """Limits of an answer on its way from the tool."""

    max_characters: int
    cut_side: str  # left, middle or right

    @classmethod
    def from_options(cls, options: MultiTurnConfig) -> "AnswerLimits":
        characters = max(MIN_CHARACTERS, LONG_TOKEN * options.max_tool_response_length)
        return cls(characters, options.tool_response_truncate_side)

    def cut(self, text: str) -> str:
        """Cut out a part of a text that is too long, and write how much is missing."""
        kept = self.max_characters
        if len(text) <= kept:
            return text
        mark = CUT.format(len(text) - kept)
        head = {"left": 0, "middle": kept // 2, "right": kept}[self.cut_side]
        return text[:head] + mark + text[len(text) - (kept - head) :]


WHOLE = AnswerLimits(MAX_MESSAGES, "middle")  # a longer one is refused, not cut


def as_observation(returned: Any, limits: AnswerLimits) -> Observation:
    """Turn text, an image, a list of both, other JSON values or an `Observation` into plain values.

    Images become {"bytes": ...}; they are encoded as PNG, except for files. A subclass becomes one of this
    package: the engine would unpickle any other.

    Raises:
        BadAnswerError: It is none of these, or too large.
    """
    observation = returned if isinstance(returned, Observation) else _gathered(returned)
    if observation.messages is not None:
        raise BadAnswerError("an Observation with `messages`, which only environments give")
    images = [_encoded(image) for image in _listed(observation.images, "images", MAX_IMAGES)]
    videos = [_plain_video(video) for video in _listed(observation.videos, "videos", MAX_IMAGES)]
    size = sum(len(ref.get("bytes") or b"") for ref in (*images, *videos))
    if size > MAX_BYTES:
        raise BadAnswerError(f"images and videos of {size >> 20} MiB, at most {MAX_BYTES >> 20} MiB")
    plain = Observation(
        text=limits.cut(plain_text(observation.text)),
        images=images,
        videos=videos,
        reward=plain_reward(observation.reward),
        done=bool(observation.done),
        failed=bool(observation.failed),
    )
    if isinstance(observation, AgentResult):
        return AgentResult(**vars(plain), turn_rewards=tuple(map(plain_reward, observation.turn_rewards)))
    return plain


def _gathered(returned: Any) -> Observation:
    if returned is None or isinstance(returned, str):
        return Observation(returned or "")
    items = returned if isinstance(returned, list | tuple) else [returned]
    images = [item for item in items if isinstance(item, Image.Image)]
    texts = [item for item in items if not isinstance(item, Image.Image)]
    if images and all(isinstance(text, str) for text in texts):
        return Observation("\n".join(texts), images)
    try:
        return Observation(json.dumps(returned, ensure_ascii=False, default=_plain_number))
    except (TypeError, ValueError, RecursionError) as error:
        kind = type(returned).__name__
        raise BadAnswerError(
            f"{kind}, not text, an image, JSON values or an Observation ({error})"
        ) from error


def _listed(values: Any, what: str, limit: int) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | dict):
        values = [values]
    items = [item for _, item in zip(range(limit + 1), values, strict=False)]
    if len(items) > limit:
        raise BadAnswerError(f"more than {limit} {what}")
    return items


def _encoded(image: Any) -> dict[str, bytes]:
    source = image
    if isinstance(image, dict):
        source = image.get("bytes") or image.get("path")
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            source = file.read(MAX_BYTES + 1)
    with _reading():
        if isinstance(source, bytes):
            with open_image(io.BytesIO(source)) as opened:  # reads the header only
                _check_size(opened.size)
            return {"bytes": bytes(memoryview(source))}
        if not isinstance(source, Image.Image | None) and hasattr(source, "__array_interface__"):
            source = Image.fromarray(source)
    if not isinstance(source, Image.Image):
        raise BadAnswerError(f"{type(source).__name__}, not an image, bytes, a path or an array")
    _check_size(source.size)
    file = io.BytesIO()
    to_rgb(source).save(file, "PNG", compress_level=1)
    return {"bytes": file.getvalue()}


def read_image(content: bytes) -> Image.Image:
    """Decode an image that a program of the policy wrote; a BadAnswerError says what is wrong."""
    with _reading(), open_image(io.BytesIO(content)) as image:
        _check_size(image.size)
        return to_rgb(image)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except BadAnswerError:
        raise
    except Exception as error:  # damaged files make Pillow raise almost anything
        raise BadAnswerError(f"an image that cannot be read ({error})") from error


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if not 0 < width * height <= MAX_PIXELS:
        raise BadAnswerError(f"an image of {width} x {height} pixels, at most {MAX_PIXELS} pixels")


def _plain_video(video: Any) -> dict[str, Any]:
    source = (video.get("bytes") or video.get("path")) if isinstance(video, dict) else video
    if isinstance(source, bytes):
        return {"bytes": bytes(memoryview(source))}
    if isinstance(source, str | os.PathLike) and os.path.isfile(source):
        return {"path": plain_text(os.path.abspath(source))}
    raise BadAnswerError(f"{type(video).__name__} as a video, not bytes or the path of a file")


def plain_text(text: Any) -> str:
    """Return a text that another process can load and a tokenizer can encode."""
    if not isinstance(text, str):
        raise BadAnswerError(f"an Observation with {type(text).__name__} as text")
    # Another process could not load a subclass; half a character could not be encoded.
    return str.__str__(text).encode(errors="replace").decode() if not text.isascii() else str.__str__(text)


def plain_reward(reward: Any) -> float | None:
    if reward is None:
        return None
    number = nearest_float(reward)
    if not abs(number) <= MAX_FLOAT32:
        raise BadAnswerError(f"a reward that is no finite number in float32: {reward!r:.100}")
    return number


def _plain_number(value: Any) -> Any:
    """Return a value that JSON does not know: a scalar or array of numpy or torch, or a decimal number."""
    if isinstance(value, Decimal):
        return float(value)
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} is no JSON value")
    return value.tolist()


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
    if size > MAX_MESSAGES:
        raise BadAnswerError(f"messages of {size} characters, at most {MAX_MESSAGES}")
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
