# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of LoRA adapters: the tensors they hold, and the full weights read from them."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.fp8_files import save_in_fp8
from verl.checkpoint.shards import AdaptedShards
from verl.models.lora import adapted_layers, adapted_parameters, attach_adapters
from verl.models.lora_weights import AdapterConfig, AdapterFiles, is_adapter, tensors_to_save
from verl.models.tiny import save_tiny_model

MODULE = "model.layers.0.self_attn.q_proj"
DOWN, UP = f"{MODULE}.lora_A.default.weight", f"{MODULE}.lora_B.default.weight"
NORM = "model.norm.weight"


class Source:
    """A checkpoint's tensors, in memory."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def read(self, name):
        return self.tensors[name]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def open_adapted(base, folder, tensors):
    config = AdapterConfig(rank=2, alpha=6, target_modules="q_proj", base=str(base))
    AdapterFiles(config, [MODULE], {}).save_pretrained(folder / "lora_adapter")
    return AdaptedShards(Source(tensors), folder, None, AutoConfig.from_pretrained(base), False)


def test_adapted_weights_are_folded_and_others_come_from_the_checkpoint_or_the_base(base, tmp_path):
    weights = load_file(base / "model.safetensors")
    down, up, norm = torch.randn(2, 128), torch.randn(128, 2), torch.full((128,), 3.0)
    shards = open_adapted(base, tmp_path, {DOWN: down, UP: up, NORM: norm})

    assert set(shards.names()) == weights.keys() | {"lm_head.weight"}
    torch.testing.assert_close(shards.read(f"{MODULE}.weight"), weights[f"{MODULE}.weight"] + 3 * up @ down)
    assert torch.equal(shards.read(f"{MODULE}.bias"), weights[f"{MODULE}.bias"])
    assert torch.equal(shards.read(NORM), norm)
    assert torch.equal(shards.read("model.embed_tokens.weight"), weights["model.embed_tokens.weight"])


def test_a_base_in_fp8_is_what_its_weights_stand_for(base, tmp_path):
    quantized = shutil.copytree(base, tmp_path / "quantized")
    expected = save_in_fp8(quantized)
    config = AdapterConfig(rank=2, alpha=6, target_modules="q_proj", base=str(quantized))
    AdapterFiles(config, [MODULE], {}).save_pretrained(tmp_path / "lora_adapter")

    adapter = {DOWN: torch.randn(2, 128), UP: torch.zeros(128, 2)}
    shards = AdaptedShards(Source(adapter), tmp_path, None, AutoConfig.from_pretrained(base), False)

    for name, value in expected.items():
        assert torch.equal(shards.read(name), value), name


@torch.no_grad()
def test_adapters_of_experts_are_folded_next_to_an_expert_tensor_that_was_trained(tmp_path):
    base = save_tiny_model(tmp_path / "mixture", "qwen3_moe")
    config = AdapterConfig(4, 6, "q_proj", base=str(base), target_parameters=("experts.down_proj",))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    attach_adapters(model, config, "lora")
    torch.manual_seed(0)
    saved = {}
    for name, param in model.named_parameters():
        if is_adapter(name) or name.endswith("experts.base_layer.gate_up_proj"):
            saved[name] = torch.nn.init.normal_(param, std=0.1)
    names = [each.name for each in adapted_parameters(model)]
    AdapterFiles(config, adapted_layers(model), {}, names).save_pretrained(tmp_path / "lora_adapter")

    shards = AdaptedShards(Source(saved), tmp_path, None, model.config, False)

    merged = AutoModelForCausalLM.from_config(model.config)
    merged.load_state_dict({name: shards.read(name) for name in shards.names()})
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    del saved["model.layers.1.mlp.experts.lora_B.default.weight"]
    cut = AdaptedShards(Source(saved), tmp_path, None, model.config, False)
    with pytest.raises(ValueError, match=r"incomplete: \['model.layers.1.mlp.experts'\]"):
        cut.read("model.layers.1.mlp.experts.down_proj")


def test_an_incomplete_adapter_is_an_error_that_names_the_module(base, tmp_path):
    shards = open_adapted(base, tmp_path, {DOWN: torch.randn(2, 128)})

    with pytest.raises(ValueError, match=rf"incomplete: \['{MODULE}'\]"):
        shards.read(f"{MODULE}.weight")


def test_frozen_adapters_are_saved_and_the_base_is_not():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("base_layer", "lora_A", "lora_B", "score")})
    model["base_layer"].requires_grad_(False)
    model["lora_A"].requires_grad_(False)
    model = nn.ModuleDict({"q": model})

    saved = tensors_to_save(model, dict(model.named_parameters()))

    assert {name.split(".")[1] for name in saved} == {"lora_A", "lora_B", "score"}
