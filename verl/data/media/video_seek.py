# SPDX-License-Identifier: Apache-2.0
"""Read video frames by number, without decoding the frames in between.

A frame's number is its position in display order. Where the container gives display times, `SeekingReader`
seeks to the keyframe before a wanted frame, decodes from there and recognizes frames by their time. If the
times do not match the decoded frames, `UnknownTimesError` is raised and the caller has to count.
Times are in ticks of the stream's time base, relative to the first frame.
"""

from bisect import bisect_right
from contextlib import suppress
from typing import NamedTuple

import av
import av.error
from av.container import InputContainer
from av.index import IndexEntries

NEIGHBORS = 16  # decoders reorder frames within this distance: H.264 and HEVC allow at most 16
# Demuxers that know the time of each frame wherever they start: MPEG program streams estimate some times, AVI
# counts positions without a frame.
EXACT_FORMATS = ("mov", "matroska", "flv", "mpegts")
MIN_JUMP = 6  # frames; a jump costs about as much as decoding this many


class UnknownTimesError(Exception):
    """The container has no times, or they do not match the decoded frames."""


class IndexTimeline:
    """Times in the index of an MP4 or QuickTime file, read lazily.

    The index is in decoding order. It gives the display times of a stream without reordering, or with evenly
    spaced frames around the wanted ones.
    """

    def __init__(self, entries: IndexEntries) -> None:
        self._entries = entries
        self._first = entries[0].timestamp
        self.spacing = (entries[-1].timestamp - self._first) / (len(entries) - 1)

    def __len__(self) -> int:
        return len(self._entries)

    def time(self, number: int) -> int:
        return self._entries[number].timestamp - self._first

    def number(self, time: int) -> int:
        """Return the last frame displayed at or before `time`."""
        return self._entries.search_timestamp(self._first + time, any_frame=True)

    def keyframe(self, number: int) -> int:
        """Return the last keyframe at or before this frame."""
        return self._entries.search_timestamp(self._entries[number].timestamp)

    def is_even_around(self, numbers: list[int]) -> bool:
        """Return whether these frames and their neighbors are evenly spaced."""
        tolerance = time_tolerance(self.spacing)
        for number in numbers:
            start = max(0, number - NEIGHBORS)
            for position, entry in enumerate(self._entries[start : number + NEIGHBORS + 1], start):
                if abs(entry.timestamp - self._first - position * self.spacing) > tolerance:
                    return False
        return True


class Packets(NamedTuple):
    """Number of packets with a frame, and their display times in order."""

    count: int
    times: list[int]  # empty if a packet has no time
    keyframes: list[int]


class PacketTimeline:
    """Times of all packets: every container has them, but must be read completely."""

    def __init__(self, packets: Packets) -> None:
        self._times = [time - packets.times[0] for time in packets.times]
        self._keyframes = [time - packets.times[0] for time in packets.keyframes]
        self.spacing = self._times[-1] / max(1, len(self._times) - 1)

    def __len__(self) -> int:
        return len(self._times)

    def time(self, number: int) -> int:
        # Frames after the last one get the times at which they should have followed.
        after = max(0, number - len(self._times) + 1)
        return self._times[number - after] + round(after * self.spacing)

    def number(self, time: int) -> int:
        return bisect_right(self._times, time) - 1

    def keyframe(self, number: int) -> int:
        before = bisect_right(self._keyframes, self.time(number))
        return self.number(self._keyframes[before - 1]) if before else 0


Timeline = IndexTimeline | PacketTimeline


def read_packets(container: InputContainer, stream: av.VideoStream) -> Packets:
    """Read all packets of a stream, without decoding."""
    count, times, keyframes = 0, [], []
    for packet in container.demux(stream):
        count += bool(packet.size)
        if packet.size and not packet.is_discard:
            times.append(packet.pts)
            if packet.is_keyframe:
                keyframes.append(packet.pts)
    if None in times:
        return Packets(count, [], [])
    return Packets(count, sorted(times), sorted(keyframes))


def index_timeline(stream: av.VideoStream, numbers: list[int]) -> IndexTimeline | None:
    """Return the timeline of the container's index if it has the times of these frames, else None."""
    entries = stream.index_entries
    if not 1 < stream.frames == len(entries) or entries[0].is_discard or entries[-1].is_discard:
        return None  # no index, or an edit list cuts the video
    timeline = IndexTimeline(entries)
    is_ordered = not stream.codec_context.has_b_frames
    return timeline if timeline.spacing > 0 and (is_ordered or timeline.is_even_around(numbers)) else None


def time_tolerance(spacing: float) -> int:
    """Return the allowed error of a time in ticks."""
    return 1 if spacing >= 4 else 0  # containers round times; with a coarse clock they need not


def frame_shown(timeline: Timeline, number: int, ticks: float) -> int:
    """Return the frame on the screen after `number` frames of so long; one past the end stays itself."""
    time = int(number * ticks + 0.5) + time_tolerance(timeline.spacing)
    return number if number >= len(timeline) else timeline.number(time)


class SeekingReader:
    """Reads frames in ascending order and jumps over unneeded ones. The container must be freshly opened."""

    def __init__(self, container: InputContainer, stream: av.VideoStream, timeline: Timeline) -> None:
        self._container, self._stream, self._timeline = container, stream, timeline
        self._tolerance = time_tolerance(timeline.spacing)
        self._frames = container.decode(stream)
        first = next(self._frames, None)
        if first is None or first.pts is None:
            raise UnknownTimesError
        self._start = first.pts  # on the stream's clock
        self._frame, self._number = first, 0

    def read(self, number: int) -> av.VideoFrame | None:
        """Return the frame with this number, not before the last one read; None past the end."""
        time = self._timeline.time(number)
        if self._timeline.keyframe(number) > self._number + MIN_JUMP:
            self._jump(time)
        while self._time(self._frame) < time - self._tolerance:
            frame = next(self._frames, None)
            if frame is None:
                return None
            self._frame = frame
        if self._time(self._frame) > time + self._tolerance:
            raise UnknownTimesError
        self._number = number
        return self._frame

    @property
    def last(self) -> tuple[int, av.VideoFrame]:
        """Number and frame that were decoded last."""
        return self._timeline.number(self._time(self._frame) + self._tolerance), self._frame

    def _jump(self, time: int) -> None:
        """Seek to a keyframe from which the frame at `time` can be decoded."""
        # The container may seek too late: to a frame that is not a keyframe, or to a keyframe displayed after
        # frames that depend on earlier ones. Then earlier positions are tried, down to the first frame.
        assert self._stream.time_base is not None, "frames have times"
        back, second = 0, max(1, round(1 / self._stream.time_base))
        while True:
            with suppress(av.error.FFmpegError):  # cannot start here; counting will show if it is damaged
                self._container.seek(self._start + max(0, time - back), stream=self._stream)
                if (frame := self._keyframe_before(time)) is not None:
                    self._frame = frame
                    return
            if back >= time:
                raise UnknownTimesError
            back = max(second, 2 * back)

    def _keyframe_before(self, time: int) -> av.VideoFrame | None:
        self._frames = self._container.decode(self._stream)
        for frame in self._frames:
            if self._time(frame) > time + self._tolerance:
                return None
            if frame.key_frame and not frame.is_corrupt:
                return frame
        return None

    def _time(self, frame: av.VideoFrame) -> int:
        if frame.pts is None:
            raise UnknownTimesError
        return frame.pts - self._start
