# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine on media that threads process while it samples."""

import gc
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoProcessor

from tests.helpers.films import save_film
from tests.workers.rollout.reference import collect, hub_tensors, load_model, rollout_config, setup_of
from tests.workers.rollout.test_processed_media import assert_equal, saved
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.models.families.tiny_sizes import TinyModel
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import INTERRUPTED, RolloutRequest, SamplingOptions
from verl.workers.rollout.processed_media import PendingMedia, ProcessedMedia
from verl.workers.rollout.vllm.weight_sync import clear_caches

pytestmark = pytest.mark.heavy

PROMPT_TOKENS = 64  # that a step of the engine reads at most
OPTIONS = SamplingOptions(n=2, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def engine(model, single_process):
    config = rollout_config(limit_images=6, max_num_batched_tokens=PROMPT_TOKENS, enable_chunked_prefill=True)
    engine = build_rollout_engine(config, setup_of(model))
    engine.sync_weights(hub_tensors(load_model(model)))
    yield engine
    engine.close()


@pytest.fixture
def loader(model):
    return MediaLoader(AutoProcessor.from_pretrained(model), MediaOptions(1, 1 << 20))


@pytest.fixture
def shared(engine, loader):
    """The loader's media, shared with the engine."""
    info = engine.engine.renderer.mm_processor.info
    media = ProcessedMedia(loader)
    media.share_with(info)
    yield media
    del info.get_hf_processor


def request_of(uid, loader, media, row, text="What?"):
    text = TinyModel.image * len(row.get("images", ())) + TinyModel.video * len(row.get("videos", ())) + text
    ids = loader.processor.tokenizer.encode(text)
    return RolloutRequest(uid, ids, loader.decode(row) if media is None else media.begin(row))


def rows_of(folder):
    film = str(folder / "film.mp4")
    save_film(Path(film), "mpeg4", 24, 12, size=(84, 56))
    one, two, three = (saved(folder, seed, 60 + 28 * seed) for seed in range(3))
    return {
        "image": {"images": [one]},
        "images": {"images": [two, three]},
        "video": {"videos": [film]},
        "both": {"images": [one], "videos": [film]},
    }


def rendered(engine, request):
    """The tensors that vLLM's model gets, by kind and number."""
    prompt = engine._prepare(request)
    tensors = {
        f"{kind} {number}": item.get_data()
        for kind, items in prompt["mm_kwargs"].items()
        for number, item in enumerate(items)
    }
    return prompt["prompt_token_ids"], tensors


def test_the_engine_gets_what_it_would_process_itself_bit_for_bit(engine, loader, counts, tmp_path, request):
    rows = rows_of(tmp_path)
    expected = {uid: rendered(engine, request_of(uid, loader, None, row)) for uid, row in rows.items()}
    media = request.getfixturevalue("shared")
    counts.clear()

    given = {uid: request_of(uid, loader, media, row) for uid, row in rows.items()}
    for uid, each in given.items():
        ids, tensors = rendered(engine, each)
        assert ids == expected[uid][0] and tensors.keys() == expected[uid][1].keys()
        for name, found in tensors.items():
            assert_equal(found, expected[uid][1][name])

    assert counts == {"images": 3, "videos": 2}
    for row in rows.values():
        loader.media(row)  # the trainer's
    assert counts == {"images": 3, "videos": 2}


def test_turns_of_a_conversation_process_each_image_once_and_its_end_frees_them(
    engine, loader, shared, counts, tmp_path
):
    media = shared
    images, held = [], []
    for turn in range(4):
        images.append(saved(tmp_path, turn))
        held.append(media.begin({"images": list(images)}))
        ids = loader.processor.tokenizer.encode(TinyModel.image * (turn + 1))
        request = RolloutRequest(turn, ids, held[-1])
        assert len(collect(engine, [request], replace(OPTIONS, n=1))) == 1
        assert counts == {"images": turn + 1}
    assert media.outputs.size > 0

    del held, request
    gc.collect()

    assert media.outputs.size == 0


def test_a_step_runs_before_the_last_image_is_processed_and_samples_are_the_same(
    engine, loader, shared, tmp_path, monkeypatch
):
    media = shared
    rows = {uid: {"images": [saved(tmp_path, uid, 168, 168)]} for uid in range(4)}  # 36 tokens each
    clear_caches(engine.engine)
    state = engine.rng_state()
    expected = collect(engine, [request_of(uid, loader, None, row) for uid, row in rows.items()], OPTIONS)
    stepped = threading.Event()
    step = engine.engine.step

    def observed_step():
        stepped.set()
        return step()

    def last():
        assert stepped.wait(60), "the engine waited for the last image before its first step"
        return media.decode(rows[3])

    monkeypatch.setattr(engine.engine, "step", observed_step)
    requests = [request_of(uid, loader, media, row) for uid, row in rows.items()]
    requests[3] = replace(requests[3], media=PendingMedia(last, media._threads))
    engine.set_rng_state(state)
    clear_caches(engine.engine)

    assert collect(engine, requests, OPTIONS) == expected


def test_unread_prompts_are_interrupted_and_dropped_like_others(engine, loader, shared, tmp_path):
    media = shared
    rows = {uid: {"images": [saved(tmp_path, uid, 168, 168)]} for uid in range(4)}
    engine.submit([request_of(uid, loader, media, row) for uid, row in rows.items()], OPTIONS)
    engine.step()
    engine.abort([3])

    begun = engine.interrupt()

    samples = [(uid, sample) for uid in range(3) for sample in range(2)]
    assert [(one.uid, one.sample) for one in begun] == samples
    assert {one.finish_reason for one in begun} == {INTERRUPTED}
    assert not engine.num_unfinished and not engine.waiting


def test_an_error_of_a_thread_names_the_prompt_and_the_file(engine, loader, shared, tmp_path):
    media = shared
    good = {uid: {"images": [saved(tmp_path, uid, 168, 168)]} for uid in range(3)}
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    requests = [request_of(uid, loader, media, row) for uid, row in good.items()]
    requests.append(request_of("row 7", loader, media, {"images": [str(bad)]}))

    with pytest.raises(ValueError, match=r"media of the prompt row 7: the image .*bad\.png cannot be read"):
        list(engine.generate(requests, OPTIONS))

    assert not engine.num_unfinished and not engine.engine.has_unfinished_requests()
