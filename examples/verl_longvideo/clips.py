# SPDX-License-Identifier: Apache-2.0
"""Step 1, split: cut each video into clips of a few seconds, small enough to be sent to a model.

A clip has the frames of its seconds at a low rate and size, as an MP4 file. Clips that are there are not cut
again: decoding continues at the last one. A clip depends on its own seconds only, so that an
interrupted cut ends with the files of an uninterrupted one.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import av
import av.error
from av.container import OutputContainer
from PIL import Image

from verl.data.media.video import opened_video
from verl.utils.images import frame_image
from verl_longvideo.settings import CutSettings
from verl_longvideo.state import digest_of, read_state, write_state

# In every build of FFmpeg, and always with the same result; x264's differs from run to run on some machines.
CODEC, QUANTIZER = "mpeg4", "3"
INDEX = "index.json"
VERSION = 2  # of the way clips are cut; another one cuts all again
TICK = Fraction(1, 1000)  # seconds, of the clips' clock
Show = Callable[[], Image.Image]


class Clip(NamedTuple):
    """A piece of a video."""

    video: str  # name
    number: int  # counted from 0
    start: float  # seconds from the beginning of the video
    end: float
    file: Path


class Source(NamedTuple):
    """A video and the folder of its clips."""

    name: str
    file: Path
    folder: Path
    cut: CutSettings

    @property
    def digest(self) -> str:
        return digest_of(VERSION, self.name, self.file.stat().st_size, *vars(self.cut).values())

    def done(self) -> list[Clip] | None:
        """Return the clips of a video that is cut; None if it is not."""
        index = read_state(self.folder / INDEX, self.digest)
        if index is None or not index["is_whole"]:
            return None
        clips = [
            Clip(self.name, number, start, end, self.folder / _file(number))
            for number, start, end in index["clips"]
        ]
        return clips if all(clip.file.is_file() for clip in clips) else None


class StoppedError(RuntimeError):
    """A cut that was asked to stop between two clips."""


def cut(source: Source, is_stopped: Callable[[], bool] = lambda: False) -> list[Clip]:
    """Cut a video into clips, or cut only the missing ones.

    Raises:
        ValueError: The video cannot be read.
        OSError: A clip cannot be written.
        StoppedError: `is_stopped` said so before a clip.
    """
    if (done := source.done()) is not None:
        return done
    if read_state(source.folder / INDEX, source.digest) is None:  # clips of another video, or cut otherwise
        shutil.rmtree(source.folder, ignore_errors=True)
        write_state(source.folder / INDEX, source.digest, {"is_whole": False})
    try:
        end = _cut_from(source, _first_to_cut(source.folder), is_stopped)
    except (av.error.FFmpegError, ValueError) as error:
        raise ValueError(f"{source.file} cannot be cut: {error}") from error
    numbers = sorted(int(file.stem) for file in source.folder.glob("*.mp4"))
    seconds = source.cut.seconds
    clips = [(number, number * seconds, min((number + 1) * seconds, end)) for number in numbers]
    write_state(source.folder / INDEX, source.digest, {"is_whole": True, "clips": clips})
    done = source.done()
    assert done is not None, "the index was written"
    return done


def duration_of(file: Path) -> float:
    """Return the seconds of a video as its container gives them; 0 if it does not."""
    with opened_video(str(file)) as (container, stream):
        if stream.duration is not None and stream.time_base is not None:
            return float(stream.duration * stream.time_base)
        return 0.0 if container.duration is None else container.duration / av.time_base


def frames_of(file: Path, number: int) -> Iterator[Any]:
    """Yield `number` frames of a clip as Pillow images, evenly spaced, or all if it has fewer."""
    with opened_video(str(file)) as (container, stream):
        frames = list(container.decode(stream))
        number = min(number, len(frames))
        for index in range(number):
            yield frame_image(frames[(2 * index + 1) * len(frames) // (2 * number)], stream)


def _cut_from(source: Source, first: int, is_stopped: Callable[[], bool]) -> float:
    """Write the clips from number `first` on; return the end of the video in seconds."""
    seconds, end = source.cut.seconds, 0.0
    with ExitStack() as stack:
        writer: _ClipWriter | None = None
        for time, length, show in _frames_from(source.file, first * seconds):
            end = max(end, round(time + length, 3))
            number = int(time / seconds)
            if writer is None or number != writer.number:
                if writer is not None:
                    writer.finish()
                if is_stopped():
                    raise StoppedError
                writer = stack.enter_context(_ClipWriter(source, number))
            writer.add(show, time - number * seconds)
        if writer is None:
            raise ValueError("it has no frame that can be decoded")
        writer.finish()
    return end


def _frames_from(file: Path, start: float) -> Iterator[tuple[float, float, Show]]:
    """Yield the times and lengths in seconds of the frames from `start` on, and what makes images of them."""
    with opened_video(str(file)) as (container, stream):
        stream.thread_type = "AUTO"
        base, rate = stream.time_base or av.time_base, stream.average_rate or 25
        frames = container.decode(stream)
        if (first := next(frames, None)) is None:
            return
        origin = _ticks(first)
        if start > 0:
            container.seek(origin + int(start / base), stream=stream)
            frames = container.decode(stream)
            sought = next(frames, None)
            if sought is None or (_ticks(sought) - origin) * base > start:  # the container seeks too late
                yield from (each for each in _frames_from(file, 0.0) if each[0] >= start)
                return
            first = sought
        for frame in chain([first], frames):
            time = float((_ticks(frame) - origin) * base)
            if time >= start:
                length = float(frame.duration * base) if frame.duration else float(1 / rate)
                yield time, length, partial(frame_image, frame, stream)


def _ticks(frame: av.VideoFrame) -> int:
    if frame.pts is None:
        raise ValueError("its frames have no times")
    return frame.pts


def _first_to_cut(folder: Path) -> int:
    """Return the last clip in the folder, which is cut again to find the end of the video, or 0."""
    return max((int(file.stem) for file in folder.glob("*.mp4")), default=0)


def _file(number: int) -> str:
    return f"{number:05d}.mp4"


class _ClipWriter:
    """Writes one clip, which appears with `finish`."""

    def __init__(self, source: Source, number: int) -> None:
        self.number = number
        self._cut, self._file = source.cut, source.folder / _file(number)
        self._partial = self._file.with_suffix(".partial")
        self._container: OutputContainer | None = None
        self._stream: Any = None
        self._next = 0  # sample to take

    def __enter__(self) -> "_ClipWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._container is not None:
            self._container.close()
        self._partial.unlink(missing_ok=True)

    def add(self, show: Show, time: float) -> None:
        """Write the frame at `time` seconds of the clip if a sample is due."""
        sample = int(time * self._cut.fps + 1e-6)
        if sample < self._next:
            return
        self._next = sample + 1
        image = show()
        if self._container is None:
            self._open(image)
        assert self._container is not None, "it was opened"
        # A new frame, since the encoder would heed what the decoder notes on its own ones.
        picture = av.VideoFrame.from_image(image.resize((self._stream.width, self._stream.height)))
        picture.pts, picture.time_base = round(time / TICK), TICK
        self._container.mux(self._stream.encode(picture))

    def finish(self) -> None:
        assert self._container is not None, "a clip begins with a frame"
        self._container.mux(self._stream.encode())
        self._container.close()
        self._container = None
        self._partial.replace(self._file)

    def _open(self, image: Image.Image) -> None:
        scale = min(1.0, self._cut.side / max(image.size))
        self._container = av.open(str(self._partial), "w", format="mp4")
        rate = Fraction(self._cut.fps).limit_denominator(1000)
        options = {"qmin": QUANTIZER, "qmax": QUANTIZER}
        self._stream = self._container.add_stream(CODEC, rate=rate, options=options)
        self._stream.width, self._stream.height = (max(2, round(side * scale / 2) * 2) for side in image.size)
        self._stream.pix_fmt, self._stream.codec_context.time_base = "yuv420p", TICK
