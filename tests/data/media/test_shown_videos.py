# SPDX-License-Identifier: Apache-2.0
"""Everybody sees the frames of a video that a player shows: turned, with square pixels, at its times."""

import base64
import io
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image
from verl_longvideo.clips import frames_of

from tests.helpers.films import MILLISECOND, UNEVEN
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.media.video import VideoOptions, probe_video, read_video
from verl.data.readers import load_processor
from verl.models.tiny import save_tiny_model
from verl.rewards.graders.chat_media import media_parts

WIDTH, HEIGHT = 168, 112
RED, GREEN, BLUE, GRAY = (200, 0, 0), (0, 200, 0), (0, 0, 200), (128, 128, 128)
UNIT = 1 << 16


def corners(*colors, width=WIDTH, height=HEIGHT) -> np.ndarray:
    """A picture of four colors: top left, top right, bottom left, bottom right."""
    pixels = np.empty((height, width, 3), np.uint8)
    halves = (slice(height // 2), slice(height // 2, None)), (slice(width // 2), slice(width // 2, None))
    for color, (rows, columns) in zip(
        colors, [(rows, columns) for rows in halves[0] for columns in halves[1]], strict=True
    ):
        pixels[rows, columns] = color
    return pixels


STORED = corners(RED, GREEN, BLUE, GRAY)
MATRICES = {  # a, b, c, d: where a player takes the directions to the right and down
    "as it is": ((1, 0, 0, 1), STORED),
    "turned left": ((0, -1, 1, 0), np.rot90(STORED)),
    "turned right": ((0, 1, -1, 0), np.rot90(STORED, -1)),
    "upside down": ((-1, 0, 0, -1), STORED[::-1, ::-1]),
    "mirrored": ((-1, 0, 0, 1), STORED[:, ::-1]),
    "mirrored upside down": ((1, 0, 0, -1), STORED[::-1]),
    "mirrored and turned left": ((0, 1, 1, 0), STORED.transpose(1, 0, 2)),
    "mirrored and turned right": ((0, -1, -1, 0), STORED.transpose(1, 0, 2)[::-1, ::-1]),
}
ASPECTS = {
    "wide pixels": (Fraction(2), STORED.repeat(2, 1)),
    "narrow pixels": (Fraction(1, 2), STORED[:, ::2]),
}


def film(matrix=None, aspect=None, name="mp4") -> bytes:
    content = io.BytesIO()
    with av.open(content, "w", format=name) as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "5"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if matrix is not None:
            a, b, c, d = (UNIT * value for value in matrix)
            stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(STORED, format="rgb24")))
        container.mux(stream.encode())
    return content.getvalue()


FILMS = {
    **{name: (film(matrix), shown) for name, (matrix, shown) in MATRICES.items()},
    "turned left in Matroska": (film((0, -1, 1, 0), name="matroska"), np.rot90(STORED)),
    **{name: (film(aspect=aspect), shown) for name, (aspect, shown) in ASPECTS.items()},
    "turned, with wide pixels": (film((0, -1, 1, 0), Fraction(2)), np.rot90(STORED.repeat(2, 1))),
}


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    processor = load_processor(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))
    return MediaLoader(processor, MediaOptions(min_pixels=1, max_pixels=1 << 20))


def judged(content: bytes) -> Image.Image:
    part = media_parts({"videos": [content]})[1]  # after the time of the first frame
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))


def asked(content: bytes, folder) -> Image.Image:
    """The frame that `verl-longvideo` asks a model about."""
    (folder / "film").write_bytes(content)
    (image,) = frames_of(folder / "film", 1)
    return image


@pytest.mark.parametrize("name", FILMS)
def test_policy_judge_and_questions_see_what_a_player_shows(name, loader, tmp_path):
    content, shown = FILMS[name]
    frames, _ = loader.decode({"videos": [content]}).videos[0]
    seen = {
        "policy": frames[0],
        "judge": np.asarray(judged(content)),
        "asked": np.asarray(asked(content, tmp_path)),
    }

    for who, pixels in seen.items():
        height, width = shown.shape[:2]
        assert pixels.shape[1] / pixels.shape[0] == pytest.approx(width / height, rel=0.01), who
        for y in (1, 3):
            for x in (1, 3):
                found = pixels[y * pixels.shape[0] // 4, x * pixels.shape[1] // 4].astype(int)
                assert np.abs(found - shown[y * height // 4, x * width // 4]).max() <= 12, (who, x, y, found)


@pytest.mark.parametrize("name", FILMS)
def test_the_size_in_a_header_is_that_of_the_frames(name, loader):
    content, shown = FILMS[name]

    assert probe_video(content)[2:] == (shown.shape[1], shown.shape[0])
    decoded = loader.decode({"videos": [content]})
    assert loader.measure({"videos": [content]}).videos == loader.shape_of(decoded).videos


@pytest.mark.parametrize("name", ["mp4", "matroska", "gif"])
def test_frames_of_a_varying_rate_are_those_that_a_player_shows_at_their_times(name, tmp_path):
    gaps = [10 * gap for gap in UNEVEN] * 4  # hundredths of a second, as GIF counts, in milliseconds
    times = np.cumsum([0, *gaps]) // 10 * 10
    path = str(tmp_path / "film")
    codec, pixels = ("gif", "rgb8") if name == "gif" else ("libx264rgb", "rgb24")
    with av.open(path, "w", format=name) as container:
        stream = container.add_stream(codec, rate=100)
        stream.width, stream.height, stream.pix_fmt = 56, 56, pixels
        stream.codec_context.time_base = MILLISECOND
        for number, time in enumerate(times):
            level = np.full((56, 56, 3), 8 * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(level, format="rgb24").reformat(format=pixels)
            frame.pts, frame.time_base = int(time), MILLISECOND
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with av.open(path) as container:
        shown = [(float(frame.time), frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]

    video = read_video(path, VideoOptions(1, 56 * 56, 28, num_frames=12))

    rate = video.meta["fps"]
    for number, found in zip(video.meta["frames_indices"], video.frames, strict=True):
        expected = [pixels for time, pixels in shown if time - shown[0][0] <= number / rate + 0.005][-1]
        np.testing.assert_array_equal(found, expected)
    assert video.meta["frames_indices"][-1] / rate == pytest.approx(times[-1] / 1000, rel=0.02)
