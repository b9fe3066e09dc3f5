# SPDX-License-Identifier: Apache-2.0
"""Videos are cut into clips of their own seconds, at a low rate and size."""

import av
import pytest
from verl_longvideo.clips import Source, StoppedError, cut, duration_of, frames_of
from verl_longvideo.settings import CutSettings

from tests.helpers.films import save_film


def source(folder, name, *, side=448, seconds=2.0, fps=4.0):
    return Source(name, folder / name, folder / "clips" / name, CutSettings(seconds, fps, side))


def times_of(clip):
    with av.open(str(clip.file)) as container:
        return [float(frame.time) for frame in container.decode(video=0)]


def test_a_clip_has_the_frames_of_its_seconds(tmp_path):
    save_film(tmp_path / "a.mp4", "mpeg4", 60, 12, fps=12)

    clips = cut(source(tmp_path, "a.mp4"))

    assert [(clip.number, clip.start, clip.end) for clip in clips] == [(0, 0, 2), (1, 2, 4), (2, 4, 5)]
    assert times_of(clips[1]) == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75], abs=0.002)
    assert len(times_of(clips[2])) == 4
    assert duration_of(tmp_path / "a.mp4") == pytest.approx(5)
    assert len(list(frames_of(clips[0].file, 3))) == 3 and len(list(frames_of(clips[2].file, 9))) == 4


@pytest.mark.parametrize("name, codec", [("a.mkv", "libx264"), ("a.avi", "mpeg4"), ("a.mpg", "mpeg2video")])
def test_every_container_is_cut_alike_and_continues_alike(name, codec, tmp_path):
    save_film(tmp_path / name, codec, 120, 24, fps=24)
    whole = [clip.file.read_bytes() for clip in cut(source(tmp_path, name))]
    (index,) = tmp_path.rglob("index.json")
    index.write_text(index.read_text().replace("true", "false"))
    (index.parent / "00002.mp4").unlink()

    again = cut(source(tmp_path, name))

    assert len(whole) == 3 and [clip.file.read_bytes() for clip in again] == whole


def test_uneven_frames_are_sampled_by_time(tmp_path):
    save_film(tmp_path / "a.mkv", "mpeg4", 60, 12, uneven=True)

    clips = cut(source(tmp_path, "a.mkv"))

    for clip in clips:
        samples = [int(time * 4) for time in times_of(clip)]
        assert samples == sorted(set(samples)) and samples[-1] < 8  # at most one in each quarter of a second


def test_a_cut_stops_between_two_clips_and_continues(tmp_path):
    save_film(tmp_path / "a.mp4", "mpeg4", 60, 12, fps=12)
    one = source(tmp_path, "a.mp4")

    with pytest.raises(StoppedError):
        cut(one, lambda: (one.folder / "00000.mp4").exists())

    assert one.done() is None and [path.name for path in one.folder.glob("0*")] == ["00000.mp4"]
    assert len(cut(one)) == 3


def test_large_frames_shrink_to_even_sides_and_small_ones_stay(tmp_path):
    save_film(tmp_path / "a.mp4", "mpeg4", 12, 12, fps=12, size=(160, 72))

    sizes = []
    for side in (64, 448):
        (clip,) = cut(source(tmp_path, "a.mp4", side=side))
        sizes.append(next(frames_of(clip.file, 1)).size)

    assert sizes == [(64, 28), (160, 72)]  # 72 * 64 / 160 = 28.8


def test_other_settings_and_another_video_are_cut_again(tmp_path):
    save_film(tmp_path / "a.mp4", "mpeg4", 48, 12, fps=12)
    first = cut(source(tmp_path, "a.mp4"))
    longer = cut(source(tmp_path, "a.mp4", seconds=3.0))
    save_film(tmp_path / "a.mp4", "mpeg4", 24, 12, fps=12)
    other = cut(source(tmp_path, "a.mp4", seconds=3.0))

    assert [len(clips) for clips in (first, longer, other)] == [2, 2, 1]
    assert longer[0].end == 3 and other[0].end == 2
    assert len(list(other[0].file.parent.glob("*.mp4"))) == 1


def test_a_file_that_is_no_video_says_so(tmp_path):
    (tmp_path / "a.mp4").write_text("no video")

    with pytest.raises(ValueError, match=r"a\.mp4 cannot be cut: .*Invalid data"):
        cut(source(tmp_path, "a.mp4"))
