# SPDX-License-Identifier: Apache-2.0
"""Kept rollouts are read back unchanged, from complete files."""

import logging
import os
import uuid
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.helpers.media import noise
from tests.helpers.rollouts import rollout
from verl.viewer.rollout_store import LONGEST_SIDE, MEDIA_FILE, SCHEMA, RolloutStore, step_files


def test_a_row_is_read_with_every_column(tmp_path):
    medium = {"kind": "video", "source": "a.mp4", "files": ["f.jpg"], "times": [0.5]}
    row = rollout(3, group=0, sample=1, media=[medium])

    assert RolloutStore(tmp_path).write(3, [row])

    (kept,) = pq.read_table(step_files(tmp_path)[3]).to_pylist()
    assert set(kept) == set(SCHEMA.names)
    lists = {"rollout_log_probs", "old_log_probs", "advantages"}
    for name in lists:
        assert kept[name] == row[name].tolist()
    assert dict(kept["reward_values"]) == {"overall": 0.0, "format": 1.0}
    assert kept["media"] == [medium | {"problem": None, "whole": None}]
    same = set(row) - lists - {"reward_values", "media"}
    assert {name: kept[name] for name in same} == {name: row[name] for name in same}
    assert kept["response_start"] == kept["response"]


def test_a_repeated_step_replaces_its_file(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(10, [rollout(10, 0, sample) for sample in range(4)])
    store.write(2, [rollout(2, 0, 0)])

    store.write(10, [rollout(10, 1, 0)])

    assert list(step_files(tmp_path)) == [2, 10]
    assert pq.read_table(step_files(tmp_path)[10])["group"].to_pylist() == ["step10-0-1"]
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_10.parquet", "step_2.parquet"]


def test_invalid_unicode_and_huge_texts_are_kept(tmp_path):
    hostile = "\ud800\x00<script>" + "x" * 1_000_000
    RolloutStore(tmp_path).write(1, [rollout(1, 0, 0, prompt=hostile, response=hostile)])

    (kept,) = pq.read_table(step_files(tmp_path)[1]).to_pylist()

    assert kept["response"] == "?" + hostile[1:]
    assert kept["response_start"] == kept["response"][:160]


def test_an_unknown_column_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no columns \['colour'\]"):
        RolloutStore(tmp_path).write(1, [rollout(1, 0, 0, colour="red")])


def test_equal_images_share_a_small_file(tmp_path):
    store = RolloutStore(tmp_path)
    image = Image.fromarray(noise(1000, 500)).convert("RGBA")

    names = {store.add_image(image), store.add_image(image.copy())}
    other = store.add_image(Image.fromarray(noise(10, 10)))

    (name,) = names
    assert name != other and MEDIA_FILE.fullmatch(name)
    with Image.open(store.folder / "media" / name) as kept:
        assert kept.size == (LONGEST_SIDE, LONGEST_SIDE // 2)
    assert image.size == (1000, 500)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_skips_the_files_of_a_step_with_one_warning(tmp_path, monkeypatch, caplog):
    store = RolloutStore(tmp_path)
    (store.folder / "media").mkdir(parents=True)
    monkeypatch.setattr(uuid, "uuid4", lambda: SimpleNamespace(hex="e" * 32))
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)

    def has_room(call, folder):
        (folder / ("e" * 32 + ".tmp")).symlink_to("/dev/full")
        return call()

    for step in (1, 2):
        for shade in (10, 20, 30):
            image = Image.new("RGB", (40, 40), (shade, step, 0))
            assert not has_room(lambda image=image: store.add_image(image), store.folder / "media")
        rows = [rollout(step, 0, 0)]
        assert not has_room(lambda step=step, rows=rows: store.write(step, rows), store.folder)

    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        f"no room to keep rollouts: path={store.folder} step={step} files=4" for step in (1, 2)
    ]
    assert list(store.folder.iterdir()) == [store.folder / "media"]
    assert store.write(3, [rollout(3, 0, 0)]) and len(caplog.records) == 2


def test_numbers_are_stored_unchanged_even_nan(tmp_path):
    values = np.array([-np.inf, np.nan, -0.5], dtype=np.float32)
    RolloutStore(tmp_path).write(1, [rollout(1, 0, 0, old_log_probs=values, score=None)])

    (kept,) = pq.read_table(step_files(tmp_path)[1]).to_pylist()

    np.testing.assert_array_equal(kept["old_log_probs"], values)
    assert kept["score"] is None
