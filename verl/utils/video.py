# SPDX-License-Identifier: Apache-2.0
"""Reading videos with PyAV: facts from the container without decoding, and the frames a model sees.

Which frames are taken, and how large they are, follows qwen-vl-utils: `fps` frames a second, an even number
of them between 4 and 768, spread evenly over the video; each frame between `min_pixels` and `max_pixels`.
"""

import io
from typing import Any, NamedTuple

import av
import numpy as np
from av.container import InputContainer

# Up to this share of a video, frames that the container announces but the decoder does not deliver (edit
# lists, a cut last group) are made up by repeating the last one.
MISSING_RATIO = 0.02


class VideoInfo(NamedTuple):
    """What a container says about its first video stream."""

    num_frames: int
    fps: float
    width: int
    height: int


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
    with av.open(_openable(source), "r") as container:
        stream = _video_stream(container)
        fps = stream.average_rate or stream.guessed_rate
        if not fps:
            raise ValueError("the video does not say its frame rate")
        num_frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        if num_frames < 1:
            raise ValueError("the video has no frames")
        return VideoInfo(num_frames, float(fps), stream.codec_context.width, stream.codec_context.height)


def choose_frames(info: VideoInfo, fps: float) -> list[int]:
    """Indices of the frames that `fps` frames a second take."""
    from qwen_vl_utils.vision_process import smart_nframes  # noqa: PLC0415 - imports torchvision: seconds

    if info.num_frames == 1:
        return [0, 0]  # two frames make one temporal patch
    count = smart_nframes({"fps": min(fps, info.fps)}, info.num_frames, info.fps)
    return np.linspace(0, info.num_frames - 1, count).round().astype(int).tolist()


def frame_size(
    num_frames: int, height: int, width: int, min_pixels: int, max_pixels: int, factor: int
) -> tuple[int, int]:
    """Height and width of the frames after resizing.

    Args:
        num_frames: Frames taken; many frames share a budget of pixels.
        height: Of the video.
        width: Of the video.
        min_pixels: Of a frame.
        max_pixels: Of a frame.
        factor: Pixels of a merged patch: sizes are multiples of it.
    """
    from qwen_vl_utils import vision_process as qwen  # noqa: PLC0415 - imports torchvision: seconds

    budget = qwen.MODEL_SEQ_LEN * factor * factor * 0.9
    most = min(qwen.VIDEO_MAX_TOKEN_NUM * factor * factor, budget / num_frames * qwen.FRAME_FACTOR)
    most = int(min(max_pixels, max(most, min_pixels * 1.05)))
    return qwen.smart_resize(height, width, factor=factor, min_pixels=min(min_pixels, most), max_pixels=most)


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


def read_video(
    source: str | bytes, fps: float, min_pixels: int, max_pixels: int, factor: int
) -> SampledVideo:
    """Decode the frames that `fps` frames a second take, resized.

    Raises:
        ValueError: The video cannot be decoded, or ends long before its container says.
        OSError: The file cannot be opened.
    """
    info = probe_video(source)
    indices = choose_frames(info, fps)
    frames = _decode(source, info, indices)  # (T, H, W, 3)
    height, width = frames.shape[1:3]
    size = frame_size(len(indices), height, width, min_pixels, max_pixels, factor)
    return SampledVideo(_resize(frames, size), video_meta(info, indices))


def _decode(source: str | bytes, info: VideoInfo, indices: list[int]) -> np.ndarray:
    wanted = set(indices)
    taken: dict[int, np.ndarray] = {}
    count, last = 0, None
    with av.open(_openable(source), "r") as container:
        stream = _video_stream(container)
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            if count in wanted:
                taken[count] = frame.to_ndarray(format="rgb24")
            count, last = count + 1, frame
            if count > indices[-1]:
                break
        if last is None:
            raise ValueError("the video has no frame that can be decoded")
        if count <= indices[-1]:
            if info.num_frames - count > max(1, MISSING_RATIO * info.num_frames):
                raise ValueError(
                    f"the video announces {info.num_frames} frames but only {count} can be decoded"
                )
            rest = last.to_ndarray(format="rgb24")
            taken |= {index: rest for index in wanted if index >= count}
    shapes = {frame.shape for frame in taken.values()}
    if len(shapes) > 1:
        raise ValueError(f"the frames change their size: {sorted(shapes)}")
    return np.stack([taken[index] for index in indices])


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
