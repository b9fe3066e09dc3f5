# SPDX-License-Identifier: Apache-2.0
"""Order, size and resumption of batches."""

import itertools
import json
from dataclasses import replace

import pytest

from tests.helpers.media import image_bytes, save_image
from verl.models.tiny import save_tiny_model
from verl.trainer.config import PPOConfig
from verl.trainer.data_loader import make_loaders
from verl.utils.media_cache import MediaCache
from verl.utils.tokenizer import load_processor, load_tokenizer


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def media_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


def make_config(model, **options):
    config = PPOConfig()
    defaults = dict(rollout_batch_size=4, max_prompt_length=64, num_workers=0)
    data = replace(config.data, **(defaults | dict(min_pixels=1600, max_pixels=9000) | options))
    actor = replace(config.worker.actor, model=replace(config.worker.actor.model, model_path=str(model)))
    return replace(config, data=data, worker=replace(config.worker, actor=actor))


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def make_files(tmp_path, num_rows=22):
    rows = [{"prompt": f"number {n}", "answer": n} for n in range(num_rows)]
    return write(tmp_path / f"numbers{num_rows}.jsonl", rows)


def make_train(model, tmp_path, cache=None, **options):
    config = make_config(model, **({"train_files": make_files(tmp_path)} | options))
    return make_loaders(config, load_tokenizer(model), load_processor(model), cache).train


def answers(batches):
    return [batch.non_tensor_batch["ground_truth"].tolist() for batch in batches]


def epochs(loader):
    """Batches without end, epoch after epoch, as training takes them."""
    while True:
        yield from loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_shows_each_row_once_in_its_own_order_and_drops_the_rest(num_workers, text_model, tmp_path):
    loader = make_train(text_model, tmp_path, num_workers=num_workers)

    first, second = answers(loader), answers(loader)

    for epoch in (first, second):
        rows = list(itertools.chain(*epoch))
        assert [len(batch) for batch in epoch] == [4] * 5 and len(loader) == 5
        assert len(set(rows)) == 20 and set(rows) <= set(range(22))
    assert first != second


def test_the_same_seed_gives_the_same_order_for_any_number_of_processes(text_model, tmp_path):
    orders = [
        answers(make_train(text_model, tmp_path, num_workers=workers, seed=seed))
        for workers, seed in ((0, 3), (2, 3), (0, 4))
    ]

    assert orders[0] == orders[1] != orders[2]


def test_without_shuffling_rows_come_in_the_order_of_the_file(text_model, tmp_path):
    loader = make_train(text_model, tmp_path, shuffle=False)

    assert list(itertools.chain(*answers(loader))) == list(range(20))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop_after", [0, 1, 3, 5, 7, 10])
def test_a_loader_that_is_stopped_and_resumed_goes_on_with_the_same_rows(
    stop_after, num_workers, text_model, tmp_path
):
    unbroken = answers(itertools.islice(epochs(make_train(text_model, tmp_path)), 13))
    stopped = make_train(text_model, tmp_path, num_workers=num_workers)
    before = answers(itertools.islice(epochs(stopped), stop_after))
    state = json.loads(json.dumps(stopped.state_dict()))

    resumed = make_train(text_model, tmp_path, num_workers=num_workers)
    resumed.load_state_dict(state)

    assert before + answers(itertools.islice(epochs(resumed), 13 - stop_after)) == unbroken


def test_a_state_of_other_data_is_refused(text_model, tmp_path):
    state = make_train(text_model, tmp_path).state_dict()
    smaller = make_train(text_model, tmp_path, train_files=make_files(tmp_path, 12))

    with pytest.raises(ValueError, match=r"differ from the checkpoint's.*'num_rows': \(22, 12\)"):
        smaller.load_state_dict(state)


def test_the_loaders_batch_is_one_call_of_the_rollout_engine(text_model, tmp_path):
    loader = make_train(text_model, tmp_path, rollout_batch_size=6, mini_rollout_batch_size=3)

    assert {len(batch) for batch in loader} == {3}


def test_fewer_rows_than_a_batch_is_an_error_with_both_numbers(text_model, tmp_path):
    message = r"`data.rollout_batch_size` \(40\) must be at most the number of usable training rows, got 22"
    with pytest.raises(ValueError, match=message):
        make_train(text_model, tmp_path, rollout_batch_size=40)


@pytest.mark.parametrize(("val_batch_size", "sizes"), [(-1, [22]), (10, [10, 10, 2])])
def test_validation_keeps_every_row_in_order(val_batch_size, sizes, text_model, tmp_path):
    config = make_config(text_model, val_files=make_files(tmp_path), val_batch_size=val_batch_size)

    loaders = make_loaders(config, load_tokenizer(text_model), None)

    for _ in range(2):
        batches = answers(loaders.val)
        assert [len(batch) for batch in batches] == sizes
        assert list(itertools.chain(*batches)) == list(range(22))
    assert loaders.train is None and len(loaders.val) == len(sizes)


def make_media_rows(tmp_path, bad):
    """24 rows, each with an image of its own; some are cut behind the header, which only decoding finds."""
    for number in range(24):
        save_image(tmp_path / f"{number}.png", 50 + number, 60, seed=number)
        if number in bad:
            (tmp_path / f"{number}.png").write_bytes(image_bytes(90, 90, seed=number)[:4000])
    rows = [{"prompt": "<image>?", "answer": n, "images": [f"{n}.png"]} for n in range(24)]
    return write(tmp_path / "rows.jsonl", rows)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_rows_are_left_out_batches_stay_full_and_a_resumed_run_agrees(num_workers, media_model, tmp_path):
    bad = {1, 5, 6, 17}
    options = dict(
        train_files=make_media_rows(tmp_path, bad), image_dir=str(tmp_path), on_bad_row="skip",
        num_workers=num_workers,
    )  # fmt: skip
    cache = MediaCache("test", owner=True, root=tmp_path)
    loader = make_train(media_model, tmp_path, cache, **options)
    whole = make_train(media_model, tmp_path, cache, **options)
    unbroken = list(itertools.islice(epochs(whole), 8))

    first = list(itertools.islice(epochs(loader), 3))
    resumed = make_train(media_model, tmp_path, cache, **options)
    resumed.load_state_dict(loader.state_dict())

    # 20 good rows make five full batches of 4.
    assert answers(first) + answers(itertools.islice(epochs(resumed), 5)) == answers(unbroken)
    assert sorted(itertools.chain(*answers(unbroken[:5]))) == sorted(set(range(24)) - bad)
    assert set(whole.bad_rows) == bad and "cannot be read" in whole.bad_rows[5].reason
    for batch in unbroken:
        for row, number in enumerate(batch.non_tensor_batch["ground_truth"]):
            media = batch.non_tensor_batch["multi_modal_data"][row]
            assert media["images"] == [str(tmp_path / f"{number}.png")]
    cache.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_row_stops_the_run_by_name_unless_it_may_be_skipped(num_workers, media_model, tmp_path):
    files = make_media_rows(tmp_path, {3})
    options = dict(train_files=files, image_dir=str(tmp_path), num_workers=num_workers)

    with pytest.raises(ValueError, match=r"rows.jsonl, row 3: the image .*3.png cannot be read"):
        list(make_train(media_model, tmp_path, **options))


def test_data_of_which_every_row_turns_out_bad_is_an_error_not_an_endless_loop(media_model, tmp_path):
    files = make_media_rows(tmp_path, set(range(24)))
    loader = make_train(media_model, tmp_path, train_files=files, image_dir=str(tmp_path), on_bad_row="skip")

    with pytest.raises(ValueError, match="no batch of 4 prompts can be filled: 24 of 24 rows are bad"):
        next(epochs(loader))


def test_what_the_loader_decoded_is_in_the_cache_for_the_workers(media_model, tmp_path):
    cache = MediaCache("test", owner=True, root=tmp_path)
    loader = make_train(
        media_model, tmp_path, cache, train_files=make_media_rows(tmp_path, ()), image_dir=str(tmp_path),
        num_workers=2,
    )  # fmt: skip

    list(loader)

    assert len(list(cache.directory.glob("*.safetensors"))) == 24
    cache.close()
