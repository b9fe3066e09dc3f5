# SPDX-License-Identifier: Apache-2.0
"""`data.streaming`: rows are checked when they are read, in an order that needs no list of all rows."""

import itertools
import json

import pytest

from tests.data.test_loader import answers, epochs, make_config, make_train, readers_of, write
from verl.data.loader import make_loaders
from verl.data.order import _drawn_from_buffer
from verl.data.rl_dataset import RLHFDataset
from verl.models.tiny import save_tiny_model


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def stream(model, tmp_path, **options):
    return make_train(model, tmp_path, **{"streaming": True, "shuffle_buffer": 6, **options})


def test_each_row_is_drawn_once_and_none_before_it_entered_the_buffer():
    import random

    order = list(_drawn_from_buffer(100, random.Random(1), 10))

    assert sorted(order) == list(range(100)) and order != list(range(100))
    assert all(row < place + 10 for place, row in enumerate(order))
    assert list(_drawn_from_buffer(100, random.Random(1), 10)) == order
    assert sorted(_drawn_from_buffer(4, random.Random(1), 10)) == list(range(4))


def test_no_row_is_rendered_before_it_is_read(text_model, tmp_path, monkeypatch):
    rendered, render = [], RLHFDataset.render
    monkeypatch.setattr(RLHFDataset, "render", lambda self, row: rendered.append(row) or render(self, row))

    loader = stream(text_model, tmp_path)
    assert not rendered

    next(iter(loader))
    assert len(rendered) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("used", [1, 4, 7])
def test_a_resumed_stream_continues_with_the_rows_that_would_have_come(
    used, num_workers, text_model, tmp_path
):
    whole = stream(text_model, tmp_path, num_workers=num_workers)
    expected = answers(itertools.islice(epochs(whole), used + 5))

    first = stream(text_model, tmp_path, num_workers=num_workers)
    list(itertools.islice(epochs(first), used))
    state = json.loads(json.dumps(first.state_dict()))
    resumed = stream(text_model, tmp_path, num_workers=num_workers)
    resumed.load_state_dict(state)

    assert answers(itertools.islice(epochs(resumed), 5)) == expected[used:]


def test_overlong_and_bad_rows_of_a_stream_are_left_out_of_full_batches(text_model, tmp_path):
    rows = [{"prompt": f"number {n}", "answer": n} for n in range(20)]
    rows[3]["prompt"], rows[5]["prompt"] = "long " * 200, 7
    path = write(tmp_path / "rows.jsonl", rows)

    loader = stream(text_model, tmp_path, train_files=path, shuffle=False, on_bad_row="skip")
    found = answers(loader)

    assert [number for batch in found for number in batch] == [n for n in range(18) if n not in (3, 5)]
    assert loader.num_overlong == 1 and list(loader.bad_rows) == [5]
    strict = stream(text_model, tmp_path, train_files=path, shuffle=False)
    with pytest.raises(ValueError, match="row 5"):
        answers(strict)


def test_a_stream_of_several_files_tells_where_a_row_stands(text_model, tmp_path):
    first = write(tmp_path / "a.jsonl", [{"prompt": "one", "answer": n} for n in range(5)])
    second = write(tmp_path / "b.jsonl", [{"prompt": "two", "answer": n, "more": n} for n in range(5, 9)])

    loader = stream(text_model, tmp_path, train_files=[first, second], shuffle=False)

    assert answers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.dataset.rows.where(6) == f"{second}, row 1"


def test_another_buffer_or_other_rows_are_not_resumed(text_model, tmp_path):
    state = stream(text_model, tmp_path).state_dict()

    with pytest.raises(ValueError, match="shuffle_buffer"):
        stream(text_model, tmp_path, shuffle_buffer=7).load_state_dict(state)
    other = write(tmp_path / "others.jsonl", [{"prompt": "x", "answer": n} for n in range(22)])
    with pytest.raises(ValueError, match="rows"):
        stream(text_model, tmp_path, train_files=other).load_state_dict(state)


def test_validation_rows_are_checked_at_the_start(text_model, tmp_path):
    path = write(
        tmp_path / "val.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "long " * 200, "answer": 2}]
    )
    config = make_config(text_model, val_files=path, streaming=True)

    val = make_loaders(config.data, readers_of(config), tmp_path / "run").val

    assert len(val.dataset) == 1 and val.dataset.num_overlong == 1
