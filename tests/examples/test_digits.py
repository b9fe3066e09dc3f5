# SPDX-License-Identifier: Apache-2.0
"""The demo of handwritten digits: its questions and images."""

import json
import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.helpers.training import QUICKSTART

sys.path.insert(0, str(QUICKSTART))
import digits


def written(folder, name, count, seed):
    file = digits.write_digits(folder, name, count, seed)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_digit_is_asked_about_once_and_a_fifth_is_held_out(tmp_path):
    train, val = written(tmp_path, "train", 2000, 1), written(tmp_path, "val", 2000, 2)

    files = [row["images"][0] for row in train + val]
    assert (len(train), len(val)) == (1437, 360) and len(set(files)) == 1797
    found = load_digits()
    for row in val[:20] + train[:20]:
        number = int(row["images"][0].removeprefix("digit_").removesuffix(".png"))
        assert row["answer"] == str(found.target[number])
        assert (number % 5 == 0) == (row in val)
        gray = np.asarray(
            Image.open(tmp_path / "images" / row["images"][0]).resize((8, 8), Image.Resampling.BOX)
        )
        assert np.corrcoef(gray.ravel(), found.images[number].ravel())[0, 1] > 0.97


def test_a_seed_draws_the_order_and_no_more_than_the_count_is_written(tmp_path):
    first, again, other = (written(tmp_path, "train", 50, seed) for seed in (1, 1, 3))

    assert first == again != other and len(first) == 50


def test_without_scikit_learn_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(SystemExit, match=r"pip install -e '.\[tasks\]'"):
        digits.write_digits(tmp_path, "val", 10, 1)
