# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and 4: a frozen tower computes features once, adapters train, and checkpoints keep hub names."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.families import load_tiny
from tests.helpers.family_training import TEMPERATURE, load_model
from tests.helpers.media import save_image, save_video
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.distributed.fsdp import full_named_tensors
from verl.models.hub_names import HubNames
from verl.models.lora_weights import AdapterConfig, is_adapter
from verl.models.trainable import TrainableOptions, select_trainable
from verl.protocol import DataProto
from verl.workers.packing import vision_features
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.vision_features import FrozenTower

ENCODERS = {
    "gemma3_vl": ("model.vision_tower.", "model.multi_modal_projector."),
    "gemma4": ("model.vision_tower.", "model.embed_vision."),
    "gemma4_moe": ("model.vision_tower.", "model.embed_vision."),
}


@pytest.fixture(params=list(ENCODERS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    images = [save_image(folder / f"{seed}.png", 150 - 50 * seed, 60, seed=seed) for seed in (1, 2)]
    return images, [save_video(folder / "c.mp4", 64, 64, 12, seed=3)]


def loader_of(tiny):
    return MediaLoader(tiny.processor, MediaOptions(400, 200 * 200, video_fps=4.0), MediaCache(None))


def batch_of(tiny, kind, loader, files):
    """Two responses to a prompt with two images, and a video where the model reads one."""
    recipe = tiny.family.tiny[kind]
    text = f"{recipe.image}one\n{recipe.image}\ntwo"
    media = {"images": files[0], "videos": []}
    if tiny.family.reads_videos:
        text, media["videos"] = text + recipe.video, files[1]
    prompt_ids = tiny.processor.tokenizer.encode(text, add_special_tokens=False)
    prompt = torch.tensor(loader.expand(prompt_ids, loader.measure(media)))
    answers = torch.randint(20, 250, (2, 6), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([prompt.expand(2, -1), answers], 1)
    tensors = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": answers,
        "response_mask": torch.ones_like(answers), "position_ids": torch.arange(ids.shape[1]).expand(2, -1),
    }  # fmt: skip
    rows = np.array([media, media], dtype=object)
    return DataProto.from_dict(tensors, {"multi_modal_data": rows, "uid": np.array(["a", "a"], dtype=object)})


@pytest.mark.parametrize("share_prompt", [False, True], ids=["apart", "shared"])
def test_features_made_once_are_those_of_every_pass(kind, files, share_prompt, monkeypatch):
    monkeypatch.setattr(vision_features, "FEATURES_AT_ONCE", 5)  # less than two images
    tiny = load_tiny(kind)
    loader, model = loader_of(tiny), load_model(tiny, True)
    batch = batch_of(tiny, kind, loader, files)
    tower = FrozenTower(model, model.config, loader, "cpu", torch.float32)
    calls = []
    model.model.vision_tower.register_forward_pre_hook(lambda *_: calls.append(None))
    forward = PackedForward(model, model.config, loader, share_prompt=share_prompt)
    expected = forward.log_probs(batch, TEMPERATURE).log_probs
    calls.clear()

    forward = PackedForward(model, model.config, loader, share_prompt=share_prompt, tower=tower)
    with tower.holding(batch.non_tensor_batch["multi_modal_data"]):
        assert len(calls) > 1
        assert tower.num_encoded == 2 + tiny.family.reads_videos
        calls.clear()
        found = forward.log_probs(batch, TEMPERATURE).log_probs

    assert not calls
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_a_frozen_tower_keeps_its_projector(kind, with_adapter):
    model = load_model(load_tiny(kind), True)
    adapter = AdapterConfig(4, 8, "all-linear") if with_adapter else None

    select_trainable(model, TrainableOptions(adapter, freeze_vision_tower=True), "worker.actor.model")

    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    encoder = {name for name, _ in model.named_parameters() if name.startswith(ENCODERS[kind])}
    assert trained and encoder and not trained & encoder
    assert not with_adapter or all(is_adapter(name) for name in trained)


def test_adapters_train_in_the_language_model_and_in_the_tower(kind, files):
    tiny = load_tiny(kind)
    loader, model = loader_of(tiny), load_model(tiny, True)
    batch = batch_of(tiny, kind, loader, files)
    expected = PackedForward(model, model.config, loader).log_probs(batch, TEMPERATURE).log_probs
    select_trainable(model, TrainableOptions(AdapterConfig(4, 8, "all-linear")), "worker.actor.model")

    found = PackedForward(model, model.config, loader).log_probs(batch, TEMPERATURE).log_probs
    found.sum().backward()

    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # a new adapter adds nothing
    grads = {name for name, param in model.named_parameters() if param.grad is not None and param.grad.any()}
    assert grads and all(is_adapter(name) for name in grads)
    assert any("vision_tower" in name for name in grads) and any("language_model" in name for name in grads)


def test_towers_keep_the_prefix_that_they_have_on_the_hub():
    tiny = load_tiny("gemma3_vl")
    stored = load_file(tiny.folder / "model.safetensors")

    written = dict(HubNames(tiny.config).convert(full_named_tensors(tiny.model)))

    tower = {name for name in written if name.startswith("vision_tower.")}
    assert tower and all(name.startswith("vision_tower.vision_model.") for name in tower)
    assert written.keys() - {"language_model.lm_head.weight"} == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


def test_scalars_of_layers_that_are_no_parameters_are_synced(kind):
    tiny = load_tiny(kind)
    written = dict(HubNames(tiny.config).convert(full_named_tensors(tiny.model)))

    scalars = [tensor.item() for name, tensor in written.items() if name.endswith("layer_scalar")]

    layers = tiny.config.get_text_config().num_hidden_layers
    assert scalars == pytest.approx([] if kind == "gemma3_vl" else [0.9] * layers)
