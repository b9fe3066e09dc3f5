# SPDX-License-Identifier: Apache-2.0
"""Convert a tool's result to an `Observation` of plain values, truncated and limited before it is sent."""

import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from PIL import Image

from verl.agents.interface import AgentResult, Observation
from verl.config.multi_turn import MultiTurnConfig
from verl.rewards.turns import MAX_FLOAT32, nearest_float
from verl.utils.images import open_image, to_rgb

LONG_TOKEN = 32  # characters; few tokens are longer, so that the tokens decide what is cut of most texts
MIN_CHARACTERS = 1 << 14
MAX_PIXELS = 1 << 26  # of an image: 8192 x 8192
MAX_IMAGES = 16  # of an answer
MAX_BYTES = 32 << 20  # of all images and videos of an answer
CUT = "\n[... {} characters ...]\n"


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
