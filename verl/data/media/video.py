# SPDX-License-Identifier: Apache-2.0
"""Read videos with PyAV: container metadata without decoding, and the frames that a model sees.

Frame selection and size follow qwen-vl-utils: `fps` frames per second, an even number between 4 and 768, or a
given number of frames; spread evenly from the first frame to the last. Number n is the frame on the screen at
the time n / fps, so that the times that models compute from numbers are a player's even if the rate varies.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import av
import av.error
import numpy as np
from av.container import InputContainer

from verl.data.media.video_seek import (
    EXACT_FORMATS,
    Packets,
    PacketTimeline,
    SeekingReader,
    UnknownTimesError,
    frame_shown,
    index_timeline,
    read_packets,
)
from verl.utils.images import open_container, shown_frame, shown_frame_size

# The last frame is repeated for frames that the container announces but the decoder does not deliver (edit
# lists, a truncated last group), up to this share of the video.
MISSING_RATIO = 0.02
DECODING_THREADS = 4  # before a jump, each one decodes a frame that is not needed
GIF = "gif"  # whose packets have times, but which cannot be read from the middle
RATE_ERROR = 0.02  # of the rate that a container names
TURNING_FORMATS = ("mov", "matroska")  # may have a display matrix, which decoded frames tell


class VideoInfo(NamedTuple):
    """Metadata of the first video stream of a container."""

    num_frames: int
    fps: float  # on average
    width: int  # as a player shows it
    height: int


@dataclass(frozen=True)
class SizeOptions:
    """Options for resizing images and frames."""

    min_pixels: int  # smaller ones are enlarged
    max_pixels: int  # larger ones are reduced
    size: tuple[int, int] | None = field(default=None, kw_only=True)  # height and width, replaces the bounds


@dataclass(frozen=True)
class VideoOptions(SizeOptions):
    """Options for sampling and resizing frames."""

    factor: int  # side of a merged patch in pixels; frame sides are multiples of it
    fps: float = 2.0  # frames sampled per second
    num_frames: int | None = None  # sampled from the whole video, rounded down to even; None uses `fps`
    # Limit in merged patches, takes precedence over `min_pixels`. Two frames that form a temporal patch share
    # their tokens.
    tokens_per_frame: int | None = None
    min_frames: int | None = None  # bounds of the number sampled by `fps`; None is that of qwen-vl-utils
    max_frames: int | None = None
    video_start: float | None = None  # seconds, of the part to sample from
    video_end: float | None = None


class SampledVideo(NamedTuple):
    """Sampled frames with the metadata that processors and vLLM expect."""

    frames: np.ndarray  # (T, H, W, 3) uint8
    meta: dict[str, Any]


def probe_video(source: str | bytes) -> VideoInfo:
    """Read frame count, rate and size, for which one frame is decoded where a file may turn it."""
    return _probe(source)[0]


def choose_frames(info: VideoInfo, options: VideoOptions) -> list[int]:
    """Choose an even number of frames, from the first one of the video or part to the last."""
    from qwen_vl_utils.vision_process import smart_nframes  # noqa: PLC0415 - imports torchvision: seconds

    part = part_of(info, options)
    if len(part) == 1:
        return [part[0]] * 2  # two frames make one temporal patch
    if options.num_frames is not None:
        count = max(2, min(options.num_frames, len(part)) // 2 * 2)
    else:
        bounds = {"min_frames": options.min_frames, "max_frames": options.max_frames}
        bounds = {name: bound for name, bound in bounds.items() if bound is not None}
        count = smart_nframes({"fps": min(options.fps, info.fps)} | bounds, len(part), info.fps)
    return np.linspace(part[0], part[-1], count).round().astype(int).tolist()


def part_of(info: VideoInfo, options: VideoOptions) -> range:
    """Return the numbers of the frames between `video_start` and `video_end`; all without them."""
    from qwen_vl_utils.vision_process import calculate_video_frame_range  # noqa: PLC0415 - imports torchvision

    times = {"video_start": options.video_start, "video_end": options.video_end}
    first, last, _ = calculate_video_frame_range(times, info.num_frames, info.fps)
    return range(first, last + 1)


def frame_size(num_frames: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
    """Return height and width of frames after resizing; many frames share a budget of pixels."""
    from qwen_vl_utils import vision_process as qwen  # noqa: PLC0415 - imports torchvision: seconds

    factor, smallest, tokens = options.factor, options.min_pixels, options.tokens_per_frame
    budget = qwen.MODEL_SEQ_LEN * factor * factor * 0.9
    most = min(qwen.VIDEO_MAX_TOKEN_NUM * factor * factor, budget / num_frames * qwen.FRAME_FACTOR)
    most = int(min(options.max_pixels, max(most, smallest * 1.05)))
    if options.size is not None:
        height, width = options.size
        smallest, most = (n * factor * factor for n in (qwen.IMAGE_MIN_TOKEN_NUM, qwen.IMAGE_MAX_TOKEN_NUM))
    if tokens is not None:
        most = min(most, tokens * factor * factor)
    size = qwen.smart_resize(height, width, factor=factor, min_pixels=min(smallest, most), max_pixels=most)
    if 0 in size or (tokens is not None and size[0] * size[1] > most):  # a narrow frame, or rounded up
        return _largest_size(height, width, max(1, most // factor**2), factor)
    return size


def video_meta(info: VideoInfo, indices: list[int], options: VideoOptions) -> dict[str, Any]:
    """Return the metadata of sampled frames, from which timestamps are computed; the total is the part's."""
    total = len(part_of(info, options))
    return {
        "total_num_frames": total, "fps": info.fps, "duration": total / info.fps,
        "frames_indices": indices, "video_backend": "pyav", "do_sample_frames": False,
    }  # fmt: skip


def read_video(source: str | bytes, options: VideoOptions) -> SampledVideo:
    """Decode and resize the chosen frames, skipping the others where possible."""
    info, packets = _probe(source)
    numbers = choose_frames(info, options)
    try:
        frames = _resized(_seek_frames(source, info, packets, numbers), len(numbers), info, options)
    except UnknownTimesError:
        frames = _resized(_count_frames(source, info, packets, numbers), len(numbers), info, options)
    return SampledVideo(frames, video_meta(info, numbers, options))


def _probe(source: str | bytes) -> tuple[VideoInfo, Packets | None]:
    with opened_video(source) as (container, stream):
        fps = stream.average_rate or stream.guessed_rate
        if not fps or fps < 0:
            raise ValueError("the video has no frame rate")
        # Packets are counted if the container has no frame count; the frames of a GIF are found by theirs.
        is_even = stream.frames and container.format.name != GIF and _has_rate(stream, float(fps))
        packets = None if is_even else _packets_of(source)
        num_frames = packets.count if packets else stream.frames
        if num_frames < 1:
            raise ValueError("the video has no frames")
        if packets and len(packets.times) > 1:
            seconds = (packets.times[-1] - packets.times[0]) * (stream.time_base or 0)
            measured = (len(packets.times) - 1) / seconds if seconds > 0 else fps
            fps = fps if abs(measured / fps - 1) < RATE_ERROR else measured
        return VideoInfo(num_frames, float(fps), *_shown_size(container, stream)), packets


def _packets_of(source: str | bytes) -> Packets:
    with opened_video(source) as (container, stream):
        return read_packets(container, stream)


def _has_rate(stream: av.VideoStream, fps: float) -> bool:
    """Return whether the container's index, if it has one, spans the time of its frames at a rate."""
    entries = stream.index_entries
    if not 1 < stream.frames == len(entries):
        return True
    seconds = (entries[-1].timestamp - entries[0].timestamp) * (stream.time_base or 0)
    return abs(fps * seconds / (stream.frames - 1) - 1) < RATE_ERROR


def _shown_size(container: InputContainer, stream: av.VideoStream) -> tuple[int, int]:
    """Return the width and height that a player shows; the container must be freshly opened."""
    width, height = stream.codec_context.width, stream.codec_context.height
    if not width or not height:
        raise ValueError("the video has no frame size")
    if container.format.name.split(",")[0] in TURNING_FORMATS:
        with suppress(av.error.FFmpegError):  # who reads the pixels says what is wrong with them
            for frame in container.decode(stream):
                return shown_frame_size(frame, stream)
    return round(width * (stream.sample_aspect_ratio or 1)), height


def _largest_size(height: int, width: int, tokens: int, factor: int) -> tuple[int, int]:
    """Return the largest size of at most `tokens` merged patches, close to the original aspect ratio."""
    scale = (height * width / tokens) ** 0.5  # side of a merged patch in original pixels
    rows, columns = max(1, int(height / scale)), max(1, int(width / scale))
    rows, columns = min(rows, tokens // columns or 1), min(columns, tokens)
    return rows * factor, min(columns, tokens // rows) * factor


# --- decoding


def _seek_frames(
    source: str | bytes, info: VideoInfo, packets: Packets | None, numbers: list[int]
) -> Iterator[av.VideoFrame]:
    """Yield the frames with these numbers, found by their times."""
    with opened_video(source) as (container, stream):
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = DECODING_THREADS
        if container.format.name.split(",")[0] not in EXACT_FORMATS:
            raise UnknownTimesError
        timeline = index_timeline(stream, numbers)
        if timeline is None:
            if packets is None:
                packets = _packets_of(source)
            if not packets.times:
                raise UnknownTimesError
            timeline = PacketTimeline(packets)
        reader = SeekingReader(container, stream, timeline)
        for index, number in enumerate(numbers):
            frame = reader.read(frame_shown(timeline, number, _ticks(stream, info)))
            if frame is None:
                last, frame = reader.last
                _check_missing(info, last + 1)
                yield from [frame] * (len(numbers) - index)
                return
            yield frame


def _ticks(stream: av.VideoStream, info: VideoInfo) -> float:
    """Return the share of time of a frame at the average rate."""
    return 1 / (info.fps * (stream.time_base or 1))


def _count_frames(
    source: str | bytes, info: VideoInfo, packets: Packets | None, numbers: list[int]
) -> Iterator[av.VideoFrame]:
    """Yield the frames with these numbers, by decoding from the start and counting."""
    with opened_video(source) as (container, stream):
        if container.format.name == GIF and packets and packets.times:
            timeline, ticks = PacketTimeline(packets), _ticks(stream, info)
            numbers = [frame_shown(timeline, number, ticks) for number in numbers]
        stream.thread_type = "AUTO"
        count, index, frame = 0, 0, None
        for frame in container.decode(stream):
            while numbers[index] == count:
                yield frame
                index += 1
                if index == len(numbers):
                    return
            count += 1
        if frame is None:
            raise ValueError("the video has no frame that can be decoded")
        _check_missing(info, count)
        yield from [frame] * (len(numbers) - index)


def _check_missing(info: VideoInfo, count: int) -> None:
    if info.num_frames - count > max(1, MISSING_RATIO * info.num_frames):
        raise ValueError(f"the video announces {info.num_frames} frames but only {count} can be decoded")


def _resized(
    frames: Iterable[av.VideoFrame], count: int, info: VideoInfo, options: VideoOptions
) -> np.ndarray:
    size = frame_size(count, info.height, info.width, options)
    resized = np.empty((count, *size, 3), dtype=np.uint8)  # (T, H, W, 3)
    shape = None
    for target, frame in zip(resized, frames, strict=True):
        pixels = shown_frame(frame)  # (H0, W0, 3)
        if pixels.shape != (shape := shape or pixels.shape):
            raise ValueError(f"frames have different sizes: {sorted({shape, pixels.shape})}")
        target[:] = resize_frame(pixels, size)
    return resized


def resize_frame(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize a frame (H0, W0, 3) to a height and width, as qwen-vl-utils does."""
    import torch  # noqa: PLC0415 - torchvision takes seconds to import; only videos need it
    from torchvision.transforms import InterpolationMode  # noqa: PLC0415
    from torchvision.transforms.functional import resize  # noqa: PLC0415

    frame = torch.from_numpy(pixels).permute(2, 0, 1)  # (3, H0, W0)
    frame = resize(frame, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)
    return frame.permute(1, 2, 0).numpy()


@contextmanager
def opened_video(source: str | bytes) -> Iterator[tuple[InputContainer, av.VideoStream]]:
    """Open the first video stream of a file; a ValueError says why it cannot be read."""
    with open_container(source) as container:
        if not container.streams.video:
            raise ValueError("the file has no video stream")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise ValueError("there is no decoder for its video stream")
        yield container, stream
