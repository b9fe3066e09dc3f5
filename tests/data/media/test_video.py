# SPDX-License-Identifier: Apache-2.0
"""Sampled frames of videos: their selection, and seeking against decoding everything."""

import time
from bisect import bisect_right

import av
import av.error
import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from benchmarks.video import repeat, save_minute
from tests.helpers.films import every_frame, save_film
from verl.data.media.video import (
    VideoInfo,
    VideoOptions,
    choose_frames,
    frame_size,
    probe_video,
    read_video,
    resize_frame,
)
from verl.data.media.video_seek import (
    PacketTimeline,
    SeekingReader,
    UnknownTimesError,
    index_timeline,
    read_packets,
)

AS_IT_IS = VideoOptions(min_pixels=1, max_pixels=56 * 56, factor=28)  # films of 56 x 56 keep their size
X264 = {"preset": "veryfast"}
OPEN_X264 = X264 | {"x264-params": "open-gop=1:bframes=3:scenecut=0"}
X265 = {"preset": "ultrafast", "x265-params": "log-level=none:keyint=24:scenecut=0:bframes=3"}
KINDS = {  # what decoders and containers do differently: reordering, open groups, times in packets only
    "mp4": ("a.mp4", "mpeg4", {}),
    "mp4 reordered": ("a.mp4", "mpeg4", {"bf": "2"}),
    "h264": ("a.mp4", "libx264", X264),
    "h264 open groups": ("a.mp4", "libx264", OPEN_X264),
    "h264 open groups in Matroska": ("a.mkv", "libx264", OPEN_X264),
    "h264 transport stream": ("a.ts", "libx264", X264),
    "hevc": ("a.mp4", "libx265", X265),
    "vp9": ("a.webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8", "lag-in-frames": "10"}),
    "mpeg2 program stream": ("a.mpg", "mpeg2video", {"bf": "2"}),
    "mpeg4 in AVI": ("a.avi", "mpeg4", {}),
    "h264 without times": ("a.h264", "libx264", X264),
}
EVERY_TIME = {  # the others by night
    ("h264", True), ("h264 open groups", False), ("hevc", False), ("vp9", True), ("mpeg4 in AVI", False),
}  # fmt: skip
NO_UNEVEN = ("mpeg2 program stream", "mpeg4 in AVI")  # the format has one rate


class CountingContainer:
    """Passes everything on to a container, counting frames and jumps."""

    def __init__(self, container):
        self.container, self.decoded, self.jumps = container, 0, 0

    def decode(self, stream):
        for frame in self.container.decode(stream):
            self.decoded += 1
            yield frame

    def seek(self, *args, **options):
        self.jumps += 1
        self.container.seek(*args, **options)


def take(path, count):
    """`count` frames from the whole video, and their numbers."""
    video = read_video(path, VideoOptions(1, 56 * 56, 28, num_frames=count))
    return video.frames, video.meta["frames_indices"]


def shown_times(path):
    """Seconds after the first frame at which each one appears."""
    with av.open(path) as container:
        times = [frame.time for frame in container.decode(video=0)]
    return [time - times[0] for time in times]


def count_work(path, count):
    """Frames decoded and jumps made for `count` frames of the video."""
    numbers = choose_frames(probe_video(path), VideoOptions(1, 1, 28, num_frames=count))
    with av.open(path) as container:
        packets = read_packets(container, container.streams.video[0])
    with av.open(path) as container:
        counting = CountingContainer(container)
        stream = container.streams.video[0]
        timeline = index_timeline(stream, numbers) or PacketTimeline(packets)
        reader = SeekingReader(counting, stream, timeline)
        assert all(reader.read(number) is not None for number in numbers)
        return counting.decoded, counting.jumps


@pytest.mark.parametrize(
    ("kind", "uneven"),
    [
        pytest.param(kind, uneven, marks=() if (kind, uneven) in EVERY_TIME else pytest.mark.nightly)
        for uneven in (False, True)
        for kind in KINDS
        if not (uneven and kind in NO_UNEVEN)
    ],
)
def test_sampled_frames_equal_those_found_by_decoding_all(kind, uneven, tmp_path):
    name, codec, options = KINDS[kind]
    path = save_film(tmp_path / name, codec, 150, 24, options=options, uneven=uneven)
    expected = every_frame(path)
    times = shown_times(path) if uneven and kind != "h264 without times" else None
    rate = probe_video(path).fps

    for count in (4, 10, 34, 150):
        frames, numbers = take(path, count)

        assert len(numbers) == count and numbers[0] == 0 and numbers[-1] == 149
        for number, frame in zip(numbers, frames, strict=True):
            shown = {number}
            if times is not None:  # containers round times
                shown = {bisect_right(times, number / rate + error) - 1 for error in (0, 1e-3, 2e-3)}
            assert any((frame == expected[one]).all() for one in shown), (number, shown)


@pytest.mark.parametrize("kind", ["mp4", "h264 open groups", "h264 open groups in Matroska", "vp9"])
def test_unneeded_frames_are_skipped(kind, tmp_path):
    # 480 frames, a keyframe each 24: a wanted frame costs its group at most, and in an open
    # group the frames shown before its keyframe.
    name, codec, options = KINDS[kind]
    path = save_film(tmp_path / name, codec, 480, 24, options=options)

    decoded, jumps = count_work(path, 8)

    assert jumps >= 7 and decoded <= 8 * (24 + 3)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_video_with_one_keyframe_is_decoded_once_from_start_to_end(name, tmp_path):
    path = save_film(tmp_path / name, "mpeg4", 300, 10_000)

    decoded, jumps = count_work(path, 16)

    assert (decoded, jumps) == (300, 0)
    expected = every_frame(path)
    frames, numbers = take(path, 16)
    assert all((frame == expected[number]).all() for frame, number in zip(frames, numbers, strict=True))


def test_wrong_times_are_detected(tmp_path):
    with av.open(save_film(tmp_path / "a.mp4", "mpeg4", 100, 12)) as container:
        stream = container.streams.video[0]
        packets = read_packets(container, stream)
        container.seek(0)
        shifted = packets._replace(times=[0] + [value + 100 for value in packets.times[1:]])

        reader = SeekingReader(container, stream, PacketTimeline(shifted))

        with pytest.raises(UnknownTimesError):
            reader.read(50)


@pytest.mark.nightly
def test_64_frames_of_an_hour_take_at_most_twice_the_work_of_64_frames_of_a_minute(tmp_path):
    minute, hour = str(tmp_path / "minute.mp4"), str(tmp_path / "hour.mp4")
    save_minute(tmp_path / "minute.mp4", 48, 160, 96)
    repeat(tmp_path / "minute.mp4", tmp_path / "hour.mp4", 60)
    options = VideoOptions(1, 64 * 28 * 28, 28, num_frames=64)

    def seconds(path):
        started = time.process_time()
        read_video(path, options)
        return time.process_time() - started

    read_video(minute, options)  # torchvision is imported
    pairs = [(seconds(minute), seconds(hour)) for _ in range(5)]

    assert probe_video(hour).num_frames == 86_400
    assert min(long for _, long in pairs) <= 2 * min(short for short, _ in pairs)


def test_unneeded_frames_of_a_video_in_memory_are_skipped_too(tmp_path):
    path = save_film(tmp_path / "a.mp4", "libx264", 200, 24, options=X264)
    content = (tmp_path / "a.mp4").read_bytes()
    options = VideoOptions(1, 56 * 56, 28, num_frames=10)

    assert (read_video(content, options).frames == read_video(path, options).frames).all()


def test_resizing_frames_one_by_one_equals_resizing_them_together():
    frames = np.random.default_rng(0).integers(0, 256, (5, 96, 160, 3), dtype=np.uint8)

    together = resize(
        torch.from_numpy(frames).permute(0, 3, 1, 2), [56, 84], InterpolationMode.BICUBIC, antialias=True
    ).permute(0, 2, 3, 1)

    assert (np.stack([resize_frame(frame, (56, 84)) for frame in frames]) == together.numpy()).all()


# --- which frames


def test_a_number_of_frames_is_spread_evenly_from_the_first_to_the_last():
    # 100 frames, 4 of them: 0, 33, 66, 99. 10 frames, 4 of them: 0, 3, 6, 9.
    options = VideoOptions(1, 1, 28, num_frames=4)

    assert choose_frames(VideoInfo(100, 25.0, 64, 48), options) == [0, 33, 66, 99]
    assert choose_frames(VideoInfo(10, 1.0, 64, 48), options) == [0, 3, 6, 9]


def test_the_number_of_frames_is_even_and_at_most_the_requested_and_available_ones():
    for wanted, present, count in [(5, 100, 4), (64, 9, 8), (1, 100, 2), (2000, 5000, 2000), (8, 1, 2)]:
        info = VideoInfo(present, 24.0, 64, 48)
        numbers = choose_frames(info, VideoOptions(1, 1, 28, num_frames=wanted))

        assert len(numbers) == count
        assert present == 1 or len(set(numbers)) == count


def test_a_frame_of_any_shape_stays_within_its_token_budget():
    for tokens in (1, 4, 16, 60, 256):
        for width, height in [(64, 48), (1920, 1080), (1080, 1920), (3000, 20), (20, 3000), (28, 28)]:
            for least in (1, 262_144):
                options = VideoOptions(least, 4_194_304, 28, tokens_per_frame=tokens)
                rows, columns = (side // 28 for side in frame_size(8, height, width, options))

                assert 0 < rows * columns <= tokens, (tokens, width, height, least)


def test_a_token_budget_is_nearly_used_up_and_keeps_the_aspect():
    # 1920 x 1080 in 256 patches: 12 rows of 21 (252), as 1080 / 1920 = 0.5625 and 12 / 21 = 0.571.
    options = VideoOptions(262_144, 4_194_304, 28, tokens_per_frame=256)

    assert frame_size(8, 1080, 1920, options) == (12 * 28, 21 * 28)


def test_a_small_frame_is_not_enlarged_to_fill_its_budget():
    options = VideoOptions(1, 4_194_304, 28, tokens_per_frame=256)

    assert frame_size(8, 56, 84, options) == (56, 84)


# --- damaged videos


def cut_before(path, number):
    """Drop this frame and all after it; the index keeps announcing them."""
    with av.open(str(path)) as container:
        position = [packet.pos for packet in container.demux(video=0) if packet.size][number]
    path.write_bytes(path.read_bytes()[:position])


@pytest.mark.parametrize("count", [4, 40])
def test_a_video_much_shorter_than_announced_is_an_error(count, tmp_path):
    path = save_film(tmp_path / "a.mp4", "mpeg4", 200, 12)
    cut_before(tmp_path / "a.mp4", 100)

    with pytest.raises(ValueError, match="announces 200 frames but only 100 can be decoded"):
        take(path, count)


def test_a_missing_last_frame_is_replaced_by_the_one_before(tmp_path):
    path = save_film(tmp_path / "a.mp4", "mpeg4", 200, 12)
    cut_before(tmp_path / "a.mp4", 199)
    expected = every_frame(path)

    frames, numbers = take(path, 8)

    assert len(expected) == 199 and numbers[-1] == 199
    assert (frames[-1] == expected[198]).all() and (frames[-2] == expected[numbers[-2]]).all()


def test_a_video_that_is_damaged_where_it_is_read_is_an_error(tmp_path):
    path = save_film(tmp_path / "a.mp4", "libx264", 100, 12, options=X264)
    with av.open(path) as container:
        position = [packet.pos for packet in container.demux(video=0) if packet.size][48]
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    content[position : position + 400] = b"\xff" * 400
    (tmp_path / "a.mp4").write_bytes(content)

    with pytest.raises((ValueError, av.error.FFmpegError)):
        take(path, 50)
