# SPDX-License-Identifier: Apache-2.0
"""Chosen frames of a video by their numbers, without decoding what lies between them.

A frame's number is its place in the order in which frames are shown. Where the container tells when each
frame is shown, `SeekingReader` jumps to the keyframe before a wanted frame and decodes forward from there;
each frame is recognised by its time, so that it is the one that counting from the start finds. Where the
times do not fit what the decoder delivers, it raises `UnknownTimesError`, and the caller has to count.

Times are in ticks of the stream's time base, from the first frame on.
"""

from bisect import bisect_right
from typing import NamedTuple, Protocol

import av
import av.error
from av.container import InputContainer
from av.index import IndexEntries

NEIGHBOURS = 16  # decoders reorder frames within this distance: H.264 and HEVC allow at most 16
# Demuxers that know the time of each frame wherever they start: MPEG program streams estimate some, AVI
# counts places that hold no frame.
EXACT_FORMATS = ("mov", "matroska", "flv", "mpegts")
WORTH_A_JUMP = 6  # frames; a jump costs about as much as decoding so many


class UnknownTimesError(Exception):
    """The container's times are missing, or are not those of the decoded frames."""


class Timeline(Protocol):
    """When frames are shown, and from which keyframe they can be decoded."""

    spacing: float

    def time(self, number: int) -> int:
        """Ticks from the first frame to this one."""
        ...

    def number(self, time: int) -> int:
        """The last frame that is shown at `time` or before."""
        ...

    def keyframe(self, number: int) -> int:
        """The last keyframe up to this frame."""
        ...


class IndexTimeline:
    """Times in the index of an MP4 or QuickTime file, read where they are needed.

    The index is in decoding order. It gives the showing times of a stream without reordering, and of one
    whose frames are evenly spaced around the wanted ones.
    """

    def __init__(self, entries: IndexEntries) -> None:
        self._entries = entries
        self._first = entries[0].timestamp
        self.spacing = (entries[-1].timestamp - self._first) / (len(entries) - 1)

    def time(self, number: int) -> int:
        """Ticks from the first frame to this one."""
        return self._entries[number].timestamp - self._first

    def number(self, time: int) -> int:
        """The last frame that is shown at `time` or before."""
        return self._entries.search_timestamp(self._first + time, any_frame=True)

    def keyframe(self, number: int) -> int:
        """The last keyframe up to this frame."""
        return self._entries.search_timestamp(self._entries[number].timestamp)

    def is_even_around(self, numbers: list[int]) -> bool:
        """Whether these frames and their neighbours are where equal distances would put them."""
        tolerance = tolerated(self.spacing)
        for number in numbers:
            start = max(0, number - NEIGHBOURS)
            for place, entry in enumerate(self._entries[start : number + NEIGHBOURS + 1], start):
                if abs(entry.timestamp - self._first - place * self.spacing) > tolerance:
                    return False
        return True


class PacketTimeline:
    """Times of all packets: every container has them, and has to be read as a whole for them."""

    def __init__(self, packets: "Packets") -> None:
        self._times = [time - packets.times[0] for time in packets.times]
        self._keyframes = [time - packets.times[0] for time in packets.keyframes]
        self.spacing = self._times[-1] / max(1, len(self._times) - 1)

    def time(self, number: int) -> int:
        """Ticks from the first frame to this one; after the last, of frames that should have followed."""
        after = max(0, number - len(self._times) + 1)
        return self._times[number - after] + round(after * self.spacing)

    def number(self, time: int) -> int:
        """The last frame that is shown at `time` or before."""
        return bisect_right(self._times, time) - 1

    def keyframe(self, number: int) -> int:
        """The last keyframe up to this frame."""
        before = bisect_right(self._keyframes, self.time(number))
        return self.number(self._keyframes[before - 1]) if before else 0


class Packets(NamedTuple):
    """What is known of a stream's packets: how many hold a frame, and their showing times in order.

    `times` is empty if a packet does not say its time.
    """

    count: int
    times: list[int]
    keyframes: list[int]


def read_packets(container: InputContainer, stream: av.VideoStream) -> Packets:
    """Read all packets of a stream; none is decoded."""
    count, times, keyframes = 0, [], []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        count += 1
        if packet.is_discard:
            continue
        times.append(packet.pts)
        if packet.is_keyframe:
            keyframes.append(packet.pts)
    if None in times:
        return Packets(count, [], [])
    return Packets(count, sorted(times), sorted(keyframes))


def index_timeline(stream: av.VideoStream, numbers: list[int]) -> IndexTimeline | None:
    """The timeline of the container's index, if it has every frame and gives the times of these."""
    entries = stream.index_entries
    if not 1 < stream.frames == len(entries):
        return None
    if entries[0].is_discard or entries[len(entries) - 1].is_discard:
        return None  # an edit list cuts the video
    timeline = IndexTimeline(entries)
    is_known = timeline.spacing > 0 and (
        not stream.codec_context.has_b_frames or timeline.is_even_around(numbers)
    )
    return timeline if is_known else None


def tolerated(spacing: float) -> int:
    """Ticks by which a time may be off: containers round, and coarse clocks do not need to."""
    return 1 if spacing >= 4 else 0


class SeekingReader:
    """Walks forward through a video, jumping over what is not wanted.

    Args:
        container: Freshly opened.
        stream: Of the container.
        timeline: Of the stream.

    Raises:
        UnknownTimesError: The decoder delivers no frame with a time.
    """

    def __init__(self, container: InputContainer, stream: av.VideoStream, timeline: Timeline) -> None:
        self._container, self._stream, self._timeline = container, stream, timeline
        self._tolerance = tolerated(timeline.spacing)
        self._frames = container.decode(stream)
        first = next(self._frames, None)
        if first is None or first.pts is None:
            raise UnknownTimesError
        self._start = first.pts  # on the stream's clock
        self._frame, self._number = first, 0

    def read(self, number: int) -> av.VideoFrame | None:
        """The frame of this number, not before the last one read; None if the video ends before it.

        Raises:
            UnknownTimesError: There is no frame at its time.
        """
        time = self._timeline.time(number)
        if self._timeline.keyframe(number) > self._number + WORTH_A_JUMP:
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
        """The frame that was decoded last, behind its number."""
        return self._timeline.number(self._time(self._frame) + self._tolerance), self._frame

    def _jump(self, time: int) -> None:
        """Go to a keyframe from which the frame at `time` can be decoded.

        The place that the container finds can be too late: at no keyframe, or at one that is shown after
        frames that need what was before it. Then an earlier one is tried, at last the first.
        """
        assert self._stream.time_base is not None, "frames have times"
        back, second = 0, max(1, round(1 / self._stream.time_base))
        while True:
            try:
                self._container.seek(self._start + max(0, time - back), stream=self._stream)
                frame = self._keyframe_before(time)
            except av.error.FFmpegError:  # no place to start at; if the video is damaged, counting will tell
                frame = None
            if frame is not None:
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
