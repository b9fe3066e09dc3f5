# SPDX-License-Identifier: Apache-2.0
"""Reading videos with PyAV: facts from the container without decoding, and the frames a model sees.

Which frames are taken, and how large they are, follows qwen-vl-utils: `fps` frames a second, an even number
of them between 4 and 768, or a given number of frames; spread evenly over the video from its first frame to
its last; each frame between `min_pixels` and `max_pixels`, and within a budget of tokens if there is one.

Times follow from frame numbers and the average rate, as in the models' processors: in a video whose rate
varies, they are those of a video of the same length and number of frames with an even rate.
"""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import av
import numpy as np
from av.container import InputContainer

from verl.data.media.video_seek import (
    EXACT_FORMATS,
    Packets,
    PacketTimeline,
    SeekingReader,
    UnknownTimesError,
    index_timeline,
    read_packets,
)

# Up to this share of a video, frames that the container announces but the decoder does not deliver (edit
# lists, a cut last group) are made up by repeating the last one.
MISSING_RATIO = 0.02
DECODING_THREADS = 4  # each one decodes a frame that nobody wants before a jump
RESIZED_BYTES = 64 << 20  # decoded frames are resized in pieces of this size, to hold few large ones


class VideoInfo(NamedTuple):
    """What a container says about its first video stream."""

    num_frames: int
    fps: float
    width: int
    height: int


@dataclass(frozen=True)
class VideoOptions:
    """How a video becomes frames.

    Attributes:
        min_pixels: Smaller frames are enlarged.
        max_pixels: Larger frames are reduced.
        factor: Pixels of the side of a merged patch; sides of frames are multiples of it.
        fps: Frames taken from a second.
        num_frames: Frames taken from the whole video instead, rounded down to an even number, and at most as
            many as it has; None goes by `fps`.
        tokens_per_frame: Merged patches of a frame at most, whatever `min_pixels` says; two frames that make
            a temporal patch share their tokens. None does not limit them.
    """

    min_pixels: int
    max_pixels: int
    factor: int
    fps: float = 2.0
    num_frames: int | None = None
    tokens_per_frame: int | None = None


class SampledVideo(NamedTuple):
    """Frames (T, H, W, 3) uint8 and the metadata that processors and vLLM want with them."""

    frames: np.ndarray
    meta: dict[str, Any]


def probe_video(source: str | bytes) -> VideoInfo:
    """Read frame count, rate and size; packets are counted where the container does not say, none is decoded.

    Raises:
        ValueError: It is no video, or does not say its frame rate.
        OSError: The file cannot be opened.
    """
    return _probe(source)[0]


def choose_frames(info: VideoInfo, options: VideoOptions) -> list[int]:
    """Numbers of the frames to take: an even count of them, from the first frame to the last."""
    from qwen_vl_utils.vision_process import smart_nframes  # noqa: PLC0415 - imports torchvision: seconds

    if info.num_frames == 1:
        return [0, 0]  # two frames make one temporal patch
    if options.num_frames is not None:
        count = max(2, min(options.num_frames, info.num_frames) // 2 * 2)
    else:
        count = smart_nframes({"fps": min(options.fps, info.fps)}, info.num_frames, info.fps)
    return np.linspace(0, info.num_frames - 1, count).round().astype(int).tolist()


def frame_size(num_frames: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
    """Height and width of the frames after resizing.

    Args:
        num_frames: Frames taken; many frames share a budget of pixels.
        height: Of the video.
        width: Of the video.
        options: Limits of a frame.
    """
    from qwen_vl_utils import vision_process as qwen  # noqa: PLC0415 - imports torchvision: seconds

    factor, smallest, tokens = options.factor, options.min_pixels, options.tokens_per_frame
    budget = qwen.MODEL_SEQ_LEN * factor * factor * 0.9
    most = min(qwen.VIDEO_MAX_TOKEN_NUM * factor * factor, budget / num_frames * qwen.FRAME_FACTOR)
    most = int(min(options.max_pixels, max(most, smallest * 1.05)))
    if tokens is not None:
        most = min(most, tokens * factor * factor)
    size = qwen.smart_resize(height, width, factor=factor, min_pixels=min(smallest, most), max_pixels=most)
    if tokens is not None and not 0 < size[0] * size[1] <= most:  # a narrow frame, or one rounded up
        return _largest_size(height, width, most // factor**2, factor)
    return size


def video_meta(info: VideoInfo, indices: list[int]) -> dict[str, Any]:
    """The metadata of sampled frames: everything timestamps are computed from."""
    return {
        "total_num_frames": info.num_frames,
        "fps": info.fps,
        "duration": info.num_frames / info.fps,
        "frames_indices": indices,
        "video_backend": "pyav",
        "do_sample_frames": False,
    }


def read_video(source: str | bytes, options: VideoOptions) -> SampledVideo:
    """Decode the frames that `options` choose, resized; what lies between them is jumped over where possible.

    Raises:
        ValueError: The video cannot be decoded, or ends long before its container says.
        OSError: The file cannot be opened.
    """
    info, packets = _probe(source)
    numbers = choose_frames(info, options)
    try:
        frames = _resized(_seek_frames(source, info, packets, numbers), len(numbers), options)
    except UnknownTimesError:
        frames = _resized(_count_frames(source, info, numbers), len(numbers), options)
    return SampledVideo(frames, video_meta(info, numbers))


def _probe(source: str | bytes) -> tuple[VideoInfo, Packets | None]:
    with av.open(_openable(source), "r") as container:
        stream = _video_stream(container)
        fps = stream.average_rate or stream.guessed_rate
        if not fps:
            raise ValueError("the video does not say its frame rate")
        packets = None if stream.frames else read_packets(container, stream)
        num_frames = packets.count if packets else stream.frames
        if num_frames < 1:
            raise ValueError("the video has no frames")
        size = stream.codec_context.width, stream.codec_context.height
        return VideoInfo(num_frames, float(fps), *size), packets


def _largest_size(height: int, width: int, tokens: int, factor: int) -> tuple[int, int]:
    """The largest size of at most `tokens` merged patches that keeps the aspect as far as it can."""
    scale = (height * width / tokens) ** 0.5  # pixels of a merged patch's side in the original
    rows, columns = max(1, int(height / scale)), max(1, int(width / scale))
    rows, columns = min(rows, tokens // columns or 1), min(columns, tokens)
    return rows * factor, min(columns, tokens // rows) * factor


# --- decoding


def _seek_frames(
    source: str | bytes, info: VideoInfo, packets: Packets | None, numbers: list[int]
) -> Iterator[av.VideoFrame]:
    """The frames of these numbers, by their times."""
    with av.open(_openable(source), "r") as container:
        stream = _video_stream(container)
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = DECODING_THREADS
        if container.format.name.split(",")[0] not in EXACT_FORMATS:
            raise UnknownTimesError
        timeline = index_timeline(stream, numbers)
        if timeline is None:
            packets = packets or _packets(source)
            if not packets.times:
                raise UnknownTimesError
            timeline = PacketTimeline(packets)
        reader = SeekingReader(container, stream, timeline)
        for place, number in enumerate(numbers):
            frame = reader.read(number)
            if frame is None:
                last, frame = reader.last
                _check_missing(info, last + 1)
                yield from [frame] * (len(numbers) - place)
                return
            yield frame


def _count_frames(source: str | bytes, info: VideoInfo, numbers: list[int]) -> Iterator[av.VideoFrame]:
    """The frames of these numbers, by decoding from the start and counting."""
    with av.open(_openable(source), "r") as container:
        stream = _video_stream(container)
        stream.thread_type = "AUTO"
        count, place, frame = 0, 0, None
        for frame in container.decode(stream):
            while place < len(numbers) and numbers[place] == count:
                yield frame
                place += 1
            if place == len(numbers):
                return
            count += 1
        if frame is None:
            raise ValueError("the video has no frame that can be decoded")
        _check_missing(info, count)
        yield from [frame] * (len(numbers) - place)


def _check_missing(info: VideoInfo, count: int) -> None:
    if info.num_frames - count > max(1, MISSING_RATIO * info.num_frames):
        raise ValueError(f"the video announces {info.num_frames} frames but only {count} can be decoded")


def _packets(source: str | bytes) -> Packets:
    with av.open(_openable(source), "r") as container:
        return read_packets(container, _video_stream(container))


def _resized(frames: Iterable[av.VideoFrame], count: int, options: VideoOptions) -> np.ndarray:
    """(T, H, W, 3) uint8; only few frames are held in their original size."""
    pieces: list[np.ndarray] = []
    done, shape, size = 0, None, (0, 0)
    resized = np.empty(0)
    for frame in frames:
        pixels = frame.to_ndarray(format="rgb24")  # (H0, W0, 3)
        if shape is None:
            shape, size = pixels.shape, frame_size(count, frame.height, frame.width, options)
            resized = np.empty((count, *size, 3), dtype=np.uint8)
        if pixels.shape != shape:
            raise ValueError(f"the frames change their size: {sorted({shape, pixels.shape})}")
        pieces.append(pixels)
        if len(pieces) * pixels.nbytes >= RESIZED_BYTES or done + len(pieces) == count:
            resized[done : done + len(pieces)] = _resize(np.stack(pieces), size)
            done, pieces = done + len(pieces), []
    assert done == count, "every chosen frame is delivered"
    return resized


def _resize(frames: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    import torch  # noqa: PLC0415 - torchvision takes seconds to import; only videos need it
    from torchvision.transforms import InterpolationMode  # noqa: PLC0415
    from torchvision.transforms.functional import resize  # noqa: PLC0415

    video = torch.from_numpy(frames).permute(0, 3, 1, 2)  # (T, 3, H, W)
    video = resize(video, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)
    return video.permute(0, 2, 3, 1).contiguous().numpy()


def _openable(source: str | bytes) -> str | io.BytesIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _video_stream(container: InputContainer) -> av.VideoStream:
    if not container.streams.video:
        raise ValueError("the file has no video stream")
    return container.streams.video[0]
