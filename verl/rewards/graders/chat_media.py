# SPDX-License-Identifier: Apache-2.0
"""Images and videos of a row as parts of a chat message, for a judge that sees.

An image becomes a JPEG inside the request; an image by URL stays a URL, which the server fetches. A video
becomes frames spread evenly over it, each after a text with its time. Imports no torch.
"""

import asyncio
import base64
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import av
from PIL import Image

from verl.utils.images import frame_image, open_container, open_image, to_rgb

Part = dict[str, Any]  # an entry of a message's `content`
Reference = str | bytes | dict[str, Any]

QUALITY = 90  # of JPEG
KEPT = 32  # encoded media of a process: the responses to a prompt share them


@dataclass(frozen=True)
class MediaLimits:
    """Bounds of the media in a question."""

    max_pixels: int = 768 * 768  # of an image or a frame; larger ones are reduced
    max_frames: int = 16  # of each video

    def __post_init__(self) -> None:
        for name in ("max_pixels", "max_frames"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")


DEFAULT_LIMITS = MediaLimits()


def media_parts(
    media: Mapping[str, Sequence[Reference]] | None, limits: MediaLimits = DEFAULT_LIMITS
) -> list[Part]:
    """Return the images and frames of a row's `multi_modal_data`, in order; audio is left out.

    Raises:
        ValueError: A file cannot be read, or a video is a URL.
    """
    images = [_image_part(ref, limits) for ref in (media or {}).get("images") or []]
    videos = (media or {}).get("videos") or []
    frames = [part for number, ref in enumerate(videos, 1) for part in _video_parts(ref, number, limits)]
    return [*images, *frames]


async def content_of(
    text: str, media: Mapping[str, Sequence[Reference]] | None, limits: MediaLimits = DEFAULT_LIMITS
) -> str | list[Part]:
    """Return the content of a message: the media, which threads decode, and the text after them."""
    parts = await asyncio.to_thread(media_parts, media, limits)
    return [*parts, {"type": "text", "text": text}] if parts else text


def _image_part(ref: Reference, limits: MediaLimits) -> Part:
    source = _source(ref)
    if isinstance(source, str) and "://" in source:
        return _url_part(source)
    return _url_part(_encoded_image(source, _modified(source), limits.max_pixels))


def _video_parts(ref: Reference, number: int, limits: MediaLimits) -> Iterator[Part]:
    source, named = _source(ref), ref if isinstance(ref, dict) else {}
    if isinstance(source, str) and "://" in source:
        raise ValueError(f"the video {source} is a URL, which a judge does not see: give the row a file")
    part = float(named.get("video_start") or 0.0), named.get("video_end")
    for time, url in _encoded_frames(source, _modified(source), *part, limits):
        yield {"type": "text", "text": f"Video {number}, {time:.1f} s:"}
        yield _url_part(url)


def _url_part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def _source(ref: Reference) -> str | bytes:
    return (ref.get("bytes") or ref["path"]) if isinstance(ref, dict) else ref


def _modified(source: str | bytes) -> int:
    """Return the time at which a file changed last, so that a new content is encoded again."""
    try:
        return os.stat(source).st_mtime_ns if isinstance(source, str) else 0
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {source!r} for the judge to see") from error


@lru_cache(maxsize=KEPT)
def _encoded_image(source: str | bytes, _modified: int, max_pixels: int) -> str:
    with open_image(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        return _data_url(to_rgb(image), max_pixels)


@lru_cache(maxsize=KEPT)
def _encoded_frames(
    source: str | bytes, _modified: int, start: float, end: float | None, limits: MediaLimits
) -> tuple[tuple[float, str], ...]:
    with open_container(source) as container:
        stream = container.streams.video[0]
        frames = _frames_at(container, start, end, limits.max_frames)
        return tuple(
            (time, _data_url(frame_image(frame, stream), limits.max_pixels)) for time, frame in frames
        )


def _frames_at(
    container: Any, start: float, end: float | None, count: int
) -> Iterator[tuple[float, av.VideoFrame]]:
    """Yield at most `count` different frames, in the middle of equal parts of a video, with their times."""
    stream = container.streams.video[0]
    last = -1.0
    end = min(_duration(container, stream), end or float("inf"))
    for number in range(count):
        wanted = start + (end - start) * (number + 0.5) / count
        container.seek(int(wanted / stream.time_base) + (stream.start_time or 0), stream=stream)
        frame = next(_until(container, stream, wanted))
        time = _time_of(frame, stream)
        if time > last:  # a short video has fewer frames
            last = time
            yield time, frame


def _until(container: Any, stream: Any, wanted: float) -> Iterator[av.VideoFrame]:
    """Yield the last frame that is shown at a time, decoded from the key frame before it."""
    shown = None
    for frame in container.decode(stream):
        if shown is not None and _time_of(frame, stream) > wanted:
            break
        shown = frame
    if shown is None:
        raise ValueError(f"the video has no frame at {wanted:.1f} s")
    yield shown


def _time_of(frame: av.VideoFrame, stream: Any) -> float:
    return float(((frame.pts or 0) - (stream.start_time or 0)) * stream.time_base)


def _duration(container: Any, stream: Any) -> float:
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if container.duration:
        return container.duration / av.time_base
    return sum(1 for _ in container.demux(stream)) / float(stream.average_rate or 1)


def _data_url(image: Image.Image, max_pixels: int) -> str:
    scale = min(1.0, (max_pixels / (image.width * image.height)) ** 0.5)
    size = max(1, int(image.width * scale)), max(1, int(image.height * scale))
    file = io.BytesIO()
    image.resize(size).save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
