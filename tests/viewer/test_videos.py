# SPDX-License-Identifier: Apache-2.0
"""The page plays videos of the given folders, and no other file that a row names."""

import pytest

from tests.helpers.media import save_video
from tests.helpers.rollouts import rollout
from tests.helpers.viewer import request, viewer
from verl.viewer.rollout_store import RolloutStore
from verl.viewer.runs import MEDIA_TYPES, VideoFolders


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "films"
    folder.mkdir()
    save_video(folder / "one.mp4", 56, 56, num_frames=8)
    (folder / "notes.txt").write_text("private")
    (folder.parent / "other.mp4").write_bytes(b"private")
    (folder / "link.mp4").symlink_to(folder.parent / "other.mp4")
    (folder / "folder.mp4").mkdir()
    return folder


def test_only_videos_inside_the_folders_are_found(films):
    found = VideoFolders([films])

    assert found.find("one.mp4") == found.find(str(films / "one.mp4")) == films / "one.mp4"
    for source in (
        *("../other.mp4", str(films.parent / "other.mp4"), "link.mp4", "notes.txt", "folder.mp4", "gone.mp4"),
        *("http://evil.example/one.mp4", "one.mp4\0", "", ".mp4", None, 7, "a" * 5000 + ".mp4"),
    ):
        assert found.find(source) is None, source
    assert VideoFolders([]).find(str(films / "one.mp4")) is None


def test_sound_is_played_as_sound_and_only_where_a_row_says_so(films):
    (films / "one.wav").write_bytes(b"RIFF")
    rows = [{"media": [{"kind": kind, "source": "one.wav"} for kind in ("audio", "image")]}]

    (row,) = VideoFolders([films]).mark(rows)

    assert [medium["is_playable"] for medium in row["media"]] == [True, False]
    assert MEDIA_TYPES[".wav"] == "audio/wav"


def test_a_video_is_sent_in_ranges_if_its_folder_was_given(films, tmp_path):
    sources = [str(films / "one.mp4"), str(films.parent / "other.mp4")]
    media = [{"kind": "video", "source": source, "files": []} for source in sources]
    RolloutStore(tmp_path).write(1, [rollout(1, 0, 0, media=media, num_media=2)])
    path = "/videos/0/train/1/{}/step1-0-0"

    with viewer(tmp_path, options=["--videos", str(films)]) as address:
        (row,) = request(address, "/api/runs/0/groups/train/1/step1-0-0").json
        assert [medium["is_playable"] for medium in row["media"]] == [True, False]
        part = request(address, path.format(0), Range="bytes=4-11")
        assert (part.status, part.body) == (206, (films / "one.mp4").read_bytes()[4:12])
        assert part.headers["content-type"] == "video/mp4"
        assert "media-src 'self'" in part.headers["content-security-policy"]
        statuses = [request(address, path.format(number)).status for number in (0, 1, 2, "x")]
        assert statuses == [200, 404, 404, 404]
    with viewer(tmp_path) as address:
        assert request(address, path.format(0)).status == 404
