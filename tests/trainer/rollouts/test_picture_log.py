# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos that a policy made are kept with their rows."""

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.trainer.rollouts.test_rollout_log import MASK, make_batch
from verl.protocol import objects
from verl.trainer.kinds.pictures import PictureLog
from verl.viewer.rollout_store import LONGEST_SIDE, TRAIN, VALIDATION, RolloutStore, step_files

STEPS = torch.arange(3).expand(4, 3)


def made(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def kept_rows(folder, pixels, kind=TRAIN, *, trained=MASK):
    """The rows of the group a, whose responses are rows 1 and 3 of the batch."""
    batch = make_batch(trained=trained)
    tensors = {"responses": STEPS, "response_mask": torch.ones_like(STEPS)}
    batch = batch.merge({"pixels": objects(pixels), **tensors}, replace=list(tensors))
    if kind == VALIDATION:
        names = [name for name in list(batch.batch.keys()) if name not in {"advantages", "old_log_probs"}]
        batch = batch.select(names)
    PictureLog(folder, 1).keep(batch, 5, kind)
    return pq.read_table(step_files(folder, kind)[5]).to_pylist()


def pixels_in(folder, name):
    with Image.open(folder / "rollouts/media" / name) as image:
        assert image.format == "PNG"
        return np.moveaxis(np.asarray(image), -1, 0)


def frames_in(folder, name):
    with av.open(str(folder / "rollouts/media" / name)) as container:
        rows = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.moveaxis(np.stack(rows), -1, 1)


def test_the_kept_file_has_the_pixels_of_its_response(tmp_path):
    pixels = [made(seed, 3, 16, 24) for seed in range(4)]

    rows = kept_rows(tmp_path, pixels)

    for row, own in zip(rows, (pixels[1], pixels[3]), strict=True):
        (name,) = row["picture"]["files"]
        np.testing.assert_array_equal(pixels_in(tmp_path, name), own)
        assert (row["picture_start"], row["picture"]["kind"], row["picture"]["problem"]) == (
            name,
            "image",
            None,
        )
    assert rows[0]["media"] == [] and rows[0]["num_media"] == 0  # those are the prompt's


def test_the_same_picture_is_one_file(tmp_path):
    same = made(0, 3, 8, 8)

    first, second = kept_rows(tmp_path, [same, same.copy(), same, same.copy()])

    assert first["picture"] == second["picture"]
    assert len([*(tmp_path / "rollouts/media").iterdir()]) == 1


def test_pictures_of_equal_bytes_and_another_shape_are_two_files(tmp_path):
    store = RolloutStore(tmp_path)

    assert store.add_picture(np.zeros((3, 4, 16), np.uint8)) != store.add_picture(
        np.zeros((3, 8, 8), np.uint8)
    )


def test_a_row_names_the_picture_and_its_tokens_are_steps(tmp_path):
    trained = torch.tensor([[1, 1, 0]] * 4)  # the last step draws no noise

    first, _ = kept_rows(tmp_path, [made(0, 3, 16, 24)] * 4, trained=trained)

    assert first["response"] == first["response_start"] == "picture of 24 x 16 pixels"
    assert first["tokens"] == ["step 0 ", "step 1 ", "step 2 "] and first["token_ids"] == [0, 1, 2]
    assert first["is_trained"] == [True, True, False] and not first["is_masked"]
    assert first["advantages"] == [1.0, 2.0, 6.0] and first["score"] == 2.0


def test_a_video_is_kept_to_play_with_some_of_its_frames(tmp_path):
    still = made(0, 3, 2, 2).repeat(16, 1).repeat(16, 2)  # (3, 32, 32), easy to encode
    video = np.stack([np.roll(still, 2 * number, 2) for number in range(15)])

    row, _ = kept_rows(tmp_path, [video] * 4)

    picture = row["picture"]
    assert row["response"] == "video of 15 frames of 32 x 32 pixels" and picture["kind"] == "video"
    shown = [pixels_in(tmp_path, name) for name in picture["files"]]
    np.testing.assert_array_equal(np.stack(shown), video[::2])  # 8 of 15, the first and the last included
    assert picture["times"] == [number / 16 for number in range(0, 15, 2)]
    assert row["picture_start"] == picture["files"][0]
    played = frames_in(tmp_path, picture["whole"])
    assert played.shape == video.shape
    assert np.abs(played.astype(int) - video).mean() < 8  # colors have half the resolution


def test_a_video_with_odd_sides_is_extended_by_a_pixel(tmp_path):
    name = RolloutStore(tmp_path).add_video(made(0, 2, 3, 15, 17))

    assert frames_in(tmp_path, name).shape == (2, 3, 16, 18)


def test_tables_show_a_small_copy_of_a_large_picture(tmp_path):
    row = PictureLog(tmp_path, 1).keep_picture(np.zeros((3, 2 * LONGEST_SIDE, LONGEST_SIDE), np.uint8))

    with Image.open(tmp_path / "rollouts/media" / row["picture_start"]) as small:
        assert small.size == (LONGEST_SIDE // 2, LONGEST_SIDE)
    assert pixels_in(tmp_path, row["picture"]["files"][0]).shape == (3, 2 * LONGEST_SIDE, LONGEST_SIDE)


@pytest.mark.parametrize(
    "shape, start",
    [((3, 16, 24), "picture of 24 x 16 pixels"), ((2, 3, 16, 24), "video of 2 frames of 24 x 16")],
)
def test_the_line_for_people_ends_in_a_file_that_exists(tmp_path, shape, start):
    line = PictureLog(tmp_path, 1).save_picture(made(0, *shape))

    described, file = line.split(", ")
    assert described.startswith(start)
    assert file in map(str, (tmp_path / "rollouts/media").iterdir())


def test_a_picture_that_finds_no_room_costs_the_file_and_not_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.viewer.rollout_store.write_whole", lambda *_, **__: False)
    log = PictureLog(tmp_path, 1)

    row = log.keep_picture(made(0, 3, 8, 8))

    assert row["picture"]["files"] == [] and row["picture"]["problem"] == "the disk is full"
    assert row["picture_start"] is None
    assert log.save_picture(made(0, 3, 8, 8)) == "picture of 8 x 8 pixels"
