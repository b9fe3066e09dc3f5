# SPDX-License-Identifier: Apache-2.0
"""Media of a row as a chat server receives them."""

import numpy as np
import pytest
from PIL import Image

from tests.data.media.test_hostile_videos import PLAYLISTS, opened_files
from tests.helpers.chat_server import image_of
from tests.helpers.films import save_film
from tests.helpers.media import image_bytes, save_image, save_video
from verl.rewards.graders.chat_media import MediaLimits, media_parts


def test_images_come_in_their_order_from_paths_bytes_and_dictionaries(tmp_path):
    path = save_image(tmp_path / "a.png", 30, 20)
    media = {"images": [path, image_bytes(10, 40), {"path": path, "min_pixels": 4}]}

    parts = media_parts(media)

    assert [image_of(part).size for part in parts] == [(30, 20), (10, 40), (30, 20)]


def test_a_row_without_media_has_no_parts():
    assert media_parts(None) == media_parts({}) == media_parts({"audios": ["a.wav"]}) == []


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_playlist_in_the_place_of_a_video_opens_no_other_file(name, tmp_path):
    save_film(tmp_path / "other.ts", "libx264", 12, 12)
    (tmp_path / name).write_bytes(PLAYLISTS[name])

    with opened_files(tmp_path) as opened, pytest.raises(ValueError, match="in none of the formats mov, "):
        media_parts({"videos": [str(tmp_path / name)]})

    assert opened == {name}


def test_an_image_above_the_limit_is_reduced_and_keeps_its_aspect_ratio(tmp_path):
    path = save_image(tmp_path / "a.png", 400, 100)

    (part,) = media_parts({"images": [path]}, MediaLimits(max_pixels=10_000))

    assert image_of(part).size == (200, 50)


def test_an_image_that_changed_is_encoded_again(tmp_path):
    path = save_image(tmp_path / "a.png", 30, 20)
    media_parts({"images": [path]})
    save_image(tmp_path / "a.png", 50, 20)

    assert image_of(*media_parts({"images": [path]})).size == (50, 20)


def test_gray_levels_of_16_bits_are_scaled_not_clipped(tmp_path):
    Image.fromarray(np.full((8, 8), 32896, np.uint16)).save(tmp_path / "a.png")

    (part,) = media_parts({"images": [str(tmp_path / "a.png")]})

    assert image_of(part).getpixel((4, 4)) == (128, 128, 128)


def test_an_image_by_url_stays_a_url():
    (part,) = media_parts({"images": ["https://example.org/a.png"]})

    assert part == {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


@pytest.mark.parametrize(("key", "ref"), [("images", "no.png"), ("videos", "no.mp4")])
def test_a_missing_file_is_an_error_with_its_name(key, ref):
    with pytest.raises(ValueError, match=f"no file '{ref}' for the judge"):
        media_parts({key: [ref]})


def test_a_video_by_url_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"example\.org/a\.mp4 is a URL.*give the row a file"):
        media_parts({"videos": ["https://example.org/a.mp4"]})


def test_limits_below_one_are_refused():
    with pytest.raises(ValueError, match="`max_frames` must be at least 1, got 0"):
        MediaLimits(max_frames=0)


@pytest.mark.parametrize(
    ("count", "part", "times", "levels"),
    [
        # 4 s of 8 frames a second: the middles of four parts of a second each are the frames 4, 12, 20, 28.
        (4, {}, [0.5, 1.5, 2.5, 3.5], [4, 12, 20, 28]),
        (1, {}, [2.0], [16]),
        (2, {"video_start": 2.0, "video_end": 3.0}, [2.25, 2.75], [18, 22]),
    ],
)
def test_frames_of_a_video_are_in_the_middle_of_equal_parts(tmp_path, count, part, times, levels):
    path = save_video(tmp_path / "a.mkv", 64, 48, num_frames=32)

    parts = media_parts({"videos": [{"path": path, **part}]}, MediaLimits(max_frames=count))

    texts, images = parts[::2], parts[1::2]
    assert [each["text"] for each in texts] == [f"Video 1, {time:.1f} s:" for time in times]
    assert [round(np.asarray(image_of(each)).mean() / 7) for each in images] == levels


def test_a_video_shorter_than_the_limit_shows_each_frame_once(tmp_path):
    path = save_video(tmp_path / "a.mkv", 64, 48, num_frames=3)

    assert len(media_parts({"videos": [path]}, MediaLimits(max_frames=16))) == 2 * 3
