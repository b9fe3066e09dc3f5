# SPDX-License-Identifier: Apache-2.0
"""Sizes of models on the meta device, compared with the weights in the files of the same models."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import stored_tensors
from tests.helpers.nightly import by_day
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.models.families.registry import load_config
from verl.models.hub_names import auto_class
from verl.models.tiny import TINY_MODELS, save_tiny_model
from verl.planning.model_sizes import read_shape


def shape_of(folder, *, is_trained=True, head="causal", dtype=None, **model):
    config = ModelConfig(model_path=str(folder), **model)
    fsdp = FSDPConfig(torch_dtype=dtype)
    return read_shape(config, fsdp, option="worker.actor.model", is_trained=is_trained, head=head)


def parameters_of(model):
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def has_equal_layers(model):
    # of layers that differ, the plan has the largest
    return len({sum(map(torch.numel, layer.parameters())) for layer in model.get_decoder().layers}) == 1


@pytest.mark.parametrize(
    "family", by_day(TINY_MODELS, "qwen2", "qwen2_5_vl", "qwen3_moe", "qwen3_5", paths=["verl/models"])
)
def test_the_weights_are_those_of_the_files(tmp_path, family):
    folder = save_tiny_model(tmp_path, family)
    model = auto_class(config := load_config(folder)).from_config(config)
    buffers = sum(model.get_buffer(name).numel() for name in model.state_dict().keys() - parameters_of(model))
    in_files = sum(tensor.numel() for tensor in stored_tensors(folder).values()) - buffers

    shape = shape_of(folder)

    tower = 0 if shape.tower is None else shape.tower.layers * shape.tower.params
    assert shape.params == in_files
    assert shape.stored == 4 * in_files
    planned = shape.root + shape.text.layers * shape.text.params + tower
    assert planned == in_files if has_equal_layers(model) else in_files < planned < 1.2 * in_files
    assert (shape.tower is not None) == bool(TINY_MODELS[family].encoders)


def test_a_frozen_model_is_held_in_bf16_and_has_no_trained_weights(tmp_path):
    shape = shape_of(save_tiny_model(tmp_path), is_trained=False)

    assert shape.stored == 2 * shape.params
    assert (shape.trained, shape.trained_stored) == (0, 0)


def test_the_weights_of_a_frozen_tower_are_not_trained(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen2_5_vl")
    visual = sum(
        tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items() if "visual" in name
    )

    shape = shape_of(folder, freeze_vision_tower=True)

    assert shape.params - shape.trained == visual > 0


def test_a_token_of_audio_has_two_frames_in_the_plan_of_a_model_that_hears(tmp_path):
    shape = shape_of(save_tiny_model(tmp_path, "qwen2_audio"))

    assert shape.tower is not None and shape.patches_per_token == 2
    assert (shape.tower.layers, shape.tower.hidden, shape.tower.intermediate) == (2, 64, 128)


@pytest.mark.parametrize(("depth", "patches"), [(3, 4), (1, 2)])  # layers of vision
def test_the_plan_has_the_encoder_that_keeps_most_for_a_token(tmp_path, monkeypatch, depth, patches):
    recipe = TINY_MODELS["qwen2_5_omni"]
    vision = {**recipe.vision, "depth": depth, "fullatt_block_indexes": [0], "hidden_size": 32}
    audio = {**recipe.audio, "encoder_layers": 2}
    monkeypatch.setitem(TINY_MODELS, "qwen2_5_omni", replace(recipe, vision=vision, audio=audio))

    shape = shape_of(save_tiny_model(tmp_path, "qwen2_5_omni"))

    # Vision: layers x 32 channels x 4 patches; audio: 2 layers x 64 channels x 2 frames.
    assert shape.patches_per_token == patches


def test_adapters_are_trained_in_float32_on_weights_in_bf16(tmp_path):
    # Two layers; rank 4 for each linear of (in, out): 4 (in + out).
    # q 128 -> 128, k and v 128 -> 64, o 128 -> 128, gate and up 128 -> 256, down 256 -> 128.
    adapters = 2 * 4 * (256 + 192 + 192 + 256 + 384 + 384 + 384)

    shape = shape_of(save_tiny_model(tmp_path), lora=LoraConfig(rank=4))

    assert shape.trained == adapters
    assert shape.trained_stored == 4 * adapters
    assert shape.stored == 2 * (shape.params - adapters) + 4 * adapters


def test_a_value_model_has_a_scalar_head(tmp_path):
    folder = save_tiny_model(tmp_path)

    assert shape_of(folder, head="scalar").vocab == 1
    assert shape_of(folder).vocab == shape_of(folder).head // 128 > 1


def test_a_row_of_joint_experts_is_one_of_them(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen3_vl_moe")

    assert shape_of(folder).largest_row == 4 * (2 * 64) * 128  # gate and up, hidden states
