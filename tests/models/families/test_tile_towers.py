# SPDX-License-Identifier: Apache-2.0
"""Models whose images are tiles: frozen towers, whose features are made once, and adapters."""

import numpy as np
import pytest
import torch

from tests.helpers.families import load_tiny
from tests.helpers.family_training import TEMPERATURE, load_model
from tests.helpers.media import save_image, save_video
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.models.lora_weights import AdapterConfig, is_adapter
from verl.models.trainable import TrainableOptions, select_trainable
from verl.protocol import DataProto
from verl.workers.packing import vision_features
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.vision_features import FrozenTower

ADAPTER = AdapterConfig(rank=4, alpha=8, target_modules="all-linear")
KINDS = ("internvl", "llava_onevision")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    return {
        "images": [
            save_image(folder / "a.png", 150, 60, seed=1),
            save_image(folder / "b.png", 50, 60, seed=2),
        ],
        "videos": [save_video(folder / "c.mp4", 64, 64, 12, seed=3)],
    }


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def batch_of(tiny, loader, files):
    """Two responses to a prompt with a video between two images."""
    recipe = tiny.family.tiny[tiny.config.model_type]
    text = f"{recipe.image}one{recipe.video}two{recipe.image}three"
    prompt_ids = tiny.processor.tokenizer.encode(text)
    media = loader.with_order(files, prompt_ids)
    prompt = torch.tensor(loader.expand(prompt_ids, loader.measure(media)))
    answers = torch.randint(8, 250, (2, 6), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([prompt.expand(2, -1), answers], 1)
    tensors = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": answers,
        "response_mask": torch.ones_like(answers), "position_ids": torch.arange(ids.shape[1]).expand(2, -1),
    }  # fmt: skip
    rows = np.array([media, media], dtype=object)
    return DataProto.from_dict(tensors, {"multi_modal_data": rows, "uid": np.array(["a", "a"], dtype=object)})


def loader_of(tiny):
    return MediaLoader(tiny.processor, MediaOptions(400, 200 * 200, video_fps=4.0), MediaCache(None))


@pytest.mark.parametrize("share_prompt", [False, True])
def test_features_made_once_in_several_calls_are_those_of_every_pass(kind, files, share_prompt, monkeypatch):
    monkeypatch.setattr(vision_features, "FEATURES_AT_ONCE", 30)  # less than an image
    tiny = load_tiny(kind)
    loader, model = loader_of(tiny), load_model(tiny, True)
    batch = batch_of(tiny, loader, files)
    tower = FrozenTower(model, model.config, loader, "cpu", torch.float32)
    calls = []
    model.model.vision_tower.register_forward_pre_hook(lambda *_: calls.append(None))

    found = []
    for held in (None, tower):
        forward = PackedForward(model, model.config, loader, share_prompt=share_prompt, tower=held)
        if held is None:
            found.append(forward.log_probs(batch, TEMPERATURE).log_probs)
            continue
        calls.clear()
        with held.holding(batch.non_tensor_batch["multi_modal_data"]):
            assert len(calls) > 1 and held.num_encoded == 3
            calls.clear()
            found.append(forward.log_probs(batch, TEMPERATURE).log_probs)
            assert not calls

    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_a_frozen_tower_keeps_all_that_features_are_made_of(kind, with_adapter):
    tiny = load_tiny(kind)
    model = load_model(tiny, True)
    adapter = ADAPTER if with_adapter else None

    select_trainable(model, TrainableOptions(adapter, freeze_vision_tower=True), "worker.actor.model")

    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained and all("language_model" in name or name.startswith("lm_head") for name in trained)
    assert not with_adapter or all(is_adapter(name) for name in trained)
    features = ("vision_tower", "multi_modal_projector", "image_newline")
    rest = {name for name, _ in model.named_parameters() if any(part in name for part in features)}
    assert rest and not rest & trained


def test_adapters_train_in_the_language_model_and_in_the_tower(kind, files):
    tiny = load_tiny(kind)
    loader, model = loader_of(tiny), load_model(tiny, True)
    batch = batch_of(tiny, loader, files)
    expected = PackedForward(model, model.config, loader).log_probs(batch, TEMPERATURE).log_probs
    select_trainable(model, TrainableOptions(ADAPTER), "worker.actor.model")

    found = PackedForward(model, model.config, loader).log_probs(batch, TEMPERATURE).log_probs
    found.sum().backward()

    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # a new adapter adds nothing
    grads = {name for name, param in model.named_parameters() if param.grad is not None and param.grad.any()}
    assert grads and all(is_adapter(name) for name in grads)
    assert any("vision_tower" in name for name in grads) and any("language_model" in name for name in grads)
