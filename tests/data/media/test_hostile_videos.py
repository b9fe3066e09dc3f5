# SPDX-License-Identifier: Apache-2.0
"""Videos with any content are frames or bad rows, and open no other file and no port."""

import ctypes
import os
import random
import threading
import time
from contextlib import contextmanager

import av
import numpy as np
import pytest

from tests.data.test_rl_dataset import open_media, write
from tests.helpers.films import save_film
from verl.data.bad_rows import BadRow
from verl.data.media.references import reading
from verl.data.media.video import VideoOptions, frame_size, probe_video, read_video
from verl.models.tiny import save_tiny_model

OPTIONS = VideoOptions(min_pixels=1, max_pixels=56 * 56, factor=28, num_frames=4)
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'
SDP = (
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    b"m=video 45678 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)
PLAYLISTS = {
    "list.m3u8": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.ts\n#EXT-X-ENDLIST\n",
    "list.mp4": b"ffconcat version 1.0\nfile other.ts\n",
}
CODECS = {
    "a.mp4": "mpeg4", "a.mov": "mpeg4", "a.mkv": "mpeg4", "a.webm": "libvpx-vp9", "a.avi": "mpeg4",
    "a.gif": "gif", "a.ts": "libx264", "a.mpg": "mpeg2video", "a.flv": "flv1", "a.wmv": "wmv2",
}  # fmt: skip


def save(path, pixel_format="yuv420p"):
    """12 frames of 56 x 56 in the container that the file's name says."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODECS[path.name], rate=12)
        stream.width, stream.height, stream.pix_fmt = 56, 56, pixel_format
        for number in range(12):
            pixels = np.full((56, 56, 3), 20 * number, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=pixel_format)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@contextmanager
def opened_files(folder):
    """Yield a set that has, at the end, the names of the folder's files that any code opened."""
    libc, names = ctypes.CDLL(None, use_errno=True), set()
    handle = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(handle, bytes(folder), 0x20) >= 0  # IN_OPEN
    try:
        yield names
        events = os.read(handle, 1 << 16)
    finally:
        os.close(handle)
    while events:
        size = 16 + int.from_bytes(events[12:16], "little")
        names.add(events[16:size].rstrip(b"\0").decode())
        events = events[size:]


@contextmanager
def opened_sockets():
    """Yield a set that has, at the end, the new sockets that this process had."""
    found, before, is_over = set(), sockets(), threading.Event()

    def watch():
        while not is_over.is_set():
            found.update(sockets() - before)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def sockets():
    names = set()
    for handle in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{handle}") or os.path.islink(f"/proc/self/fd/{handle}"):
            names.add(os.readlink(f"/proc/self/fd/{handle}"))
    return {name for name in names if name.startswith("socket:")}


@pytest.mark.parametrize("name", CODECS)
def test_videos_of_the_usual_containers_are_read(name, tmp_path):
    path = save(tmp_path / name, "rgb8" if name == "a.gif" else "yuv420p")

    for source in (str(path), path.read_bytes()):
        video = read_video(source, OPTIONS)

        # Frames 0, 4, 7 and 11 have gray levels 0, 80, 140 and 220; a GIF rounds to 8 levels of red.
        np.testing.assert_allclose(video.frames[:, 0, 0, 0], [0, 80, 140, 220], atol=9)
        assert probe_video(source)[0] == 12


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_playlist_opens_no_other_file(name, tmp_path):
    save_film(tmp_path / "other.ts", "libx264", 12, 12)
    (tmp_path / name).write_bytes(PLAYLISTS[name])

    with opened_files(tmp_path) as opened, pytest.raises(ValueError, match="in none of the formats mov, "):
        probe_video(str(tmp_path / name))

    assert opened == {name}


def test_a_session_description_opens_no_port():
    with opened_sockets() as opened, pytest.raises(ValueError, match="in none of the formats mov, "):
        probe_video(SDP)

    assert not opened


def test_a_path_is_not_taken_for_a_protocol(tmp_path):
    # `concat:A|B` and `subfile:` are protocols of FFmpeg that open other files.
    save(tmp_path / "a.ts")

    with pytest.raises(ValueError, match="in none of the formats"):
        probe_video(f"concat:{tmp_path}/a.ts|{tmp_path}/a.ts")
    assert probe_video(f"file:{tmp_path}/a.ts").num_frames == 12


def test_a_very_wide_video_keeps_a_row_of_patches():
    # 5432 x 56 in at most 22500 pixels, which are 28 patches of 28 x 28: 22500 / 784 = 28.7.
    assert frame_size(4, 56, 5432, VideoOptions(1600, 22500, 28)) == (28, 28 * 28)


@pytest.fixture(scope="module")
def media_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


def damaged(content, random_numbers):
    """Return the content with one to sixteen places of its first 2000 bytes changed, or cut there."""
    content = bytearray(content)
    for _ in range(random_numbers.choice([1, 4, 16])):
        start = random_numbers.randrange(min(len(content), 2000))
        if random_numbers.random() < 0.1:
            del content[start + 1 :]
        else:
            size = random_numbers.choice([1, 4])
            content[start : start + size] = random_numbers.choice(
                [bytes(size), b"\xff" * size, os.urandom(size)]
            )
    return bytes(content)


def test_a_video_with_any_content_is_a_prompt_or_a_bad_row(media_model, tmp_path):
    numbers = random.Random(0)
    good = [save(tmp_path / name).read_bytes() for name in CODECS if name != "a.gif"]
    contents = [
        SVG,
        SVG.replace(b"<svg", b'<?xml version="1.0"?>\n<svg'),
        SDP,
        *PLAYLISTS.values(),
        b"",
        b"RIFF",
    ]
    contents += [damaged(numbers.choice(good), numbers) for _ in range(150)]
    rows = [{"problem": "1?", "answer": "1"}]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.mp4").write_bytes(content)
        rows.append({"problem": "<video>", "answer": "1", "videos": [f"{number}.mp4"]})

    dataset = open_media(
        media_model, write(tmp_path, rows), video_dir=str(tmp_path), on_bad_row="skip", max_prompt_length=4096
    )
    items = [dataset[index] for index in range(len(dataset))]

    bad = {
        row.index: row.reason
        for row in [*dataset.bad_rows, *(item for item in items if isinstance(item, BadRow))]
    }
    for number in range(7):
        assert f"the video {tmp_path}/{number}.mp4 cannot be read: " in bad[number + 1]
    assert 20 < len(bad) < 150 and len(dataset) + len(dataset.bad_rows) == len(rows)


def test_a_fault_of_the_installation_is_no_bad_file():
    with pytest.raises(ImportError), reading("video", "a.mp4"):
        import no_such_module  # noqa: F401
