# SPDX-License-Identifier: Apache-2.0
"""Adapters of joint expert tensors against peft's own `target_parameters`."""

import json
from dataclasses import replace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from tests.helpers.causal_families import FAMILIES, build_family
from verl.config.model import ModelConfig
from verl.models.hub_names import meta_model
from verl.models.lora import (
    adapted_layers,
    adapted_parameters,
    adapters_disabled,
    attach_adapters,
    set_adapter,
)
from verl.models.lora_weights import (
    AdapterConfig,
    AdapterFiles,
    fold,
    is_adapter,
    read_adapter,
    read_adapter_config,
)
from verl.models.tiny import save_tiny_model
from verl.models.trainable import select_trainable
from verl.planning.memory_model import MicroBatch, ModelSetup, log_prob_peak, update_peak
from verl.planning.model_sizes import model_shape

OPTION = "worker.actor.model.lora"
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
TARGETS = {
    "experts": (DOWN, GATE_UP),
    "one of two": (DOWN,),
    "router": ("gate.weight", GATE_UP),
}
IDS = torch.arange(5, 29).view(2, 12)


def config_of(targets, modules="q_proj,v_proj", **options):
    return AdapterConfig(4, 6, modules, target_parameters=tuple(targets), **options)


@pytest.mark.parametrize("targets", [(), (DOWN, GATE_UP)])
@pytest.mark.parametrize("model_type", ["llama4_text", "phimoe"])
def test_all_linear_leaves_out_routers_that_return_more_than_a_tensor(model_type, targets):
    """Llama 4 and Phi-MoE derive their router from `nn.Linear`."""
    model = build_family(model_type, FAMILIES[model_type])
    with torch.no_grad():
        before = model(IDS).logits

    names = attach_adapters(model, config_of(targets, "all-linear" if not targets else "q_proj"), OPTION)

    assert any(name.endswith("q_proj") for name in names)
    assert not any(name.endswith("router") for name in names)
    assert torch.allclose(model(IDS).logits, before, atol=1e-6)
    adapters = {name: param for name, param in model.named_parameters() if is_adapter(name)}
    with torch.no_grad():
        for param in adapters.values():
            param.add_(0.01)
    model(IDS).logits.square().mean().backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in adapters.values())


def test_a_router_that_is_named_alone_is_an_error():
    model = build_family("llama4_text", FAMILIES["llama4_text"])

    with pytest.raises(ValueError, match=r"target_modules` \(router\) matches no linear module of Llama4"):
        attach_adapters(model, config_of((), "router"), OPTION)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def gpt_oss():
    """A model whose experts are held as (experts, in, out), with biases."""
    torch.manual_seed(0)
    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2,
            attn_implementation="eager",
        )
    ).eval()  # fmt: skip


def with_peft(model, config, seed=3):
    """Peft's own model with the same options, from the same random numbers."""
    torch.manual_seed(seed)
    theirs = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=config.target_modules.split(","),
        target_parameters=list(config.target_parameters),
        use_rslora=config.use_rslora,
    )
    return peft.get_peft_model(model, theirs, autocast_adapter_dtype=False)


@torch.no_grad()
def move(model, seed=5):
    torch.manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.05)


def adapter_of(model):
    tensors = {name: param.detach() for name, param in model.named_parameters() if is_adapter(name)}
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


def test_endings_of_names_select_tensors_and_linear_modules_may_be_left_out(folder):
    model = load(folder)

    names = attach_adapters(model, config_of([DOWN, "0.mlp.experts.gate_up_proj"], ""), OPTION)

    held = "model.layers.{}.mlp.experts.{}"
    assert names == [held.format(0, "gate_up_proj"), held.format(0, "down_proj"), held.format(1, "down_proj")]
    assert {each.name for each in adapted_parameters(model)} == set(names)
    assert not adapted_layers(model)
    assert all(param.requires_grad == is_adapter(name) for name, param in model.named_parameters())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            config_of(["expert.down"]),
            r"\(expert.down\) matches no tensor of Qwen3Moe.* outside of its linear mod",
        ),
        (config_of(["q_proj.weight"]), "it has experts.down_proj, experts.gate_up_proj, gate.weight"),
        (config_of(["lm_head.weight"]), "matches no tensor"),
        (config_of([DOWN], use_dora=True), "is not possible with DoRA"),
    ],
)
def test_targets_that_cannot_be_adapted_are_errors_that_list_what_can(folder, config, message):
    with pytest.raises(ValueError, match=message) as raised:
        attach_adapters(load(folder), config, OPTION)

    assert f"`{OPTION}.target_parameters`" in str(raised.value)


def test_a_target_without_a_match_among_others_is_a_warning(folder, caplog):
    attach_adapters(load(folder), config_of([DOWN, "experts.up_proj"]), OPTION)

    assert [record.getMessage() for record in caplog.records] == [
        f"`{OPTION}.target_parameters`: experts.up_proj matches no tensor of Qwen3MoeForCausalLM"
    ]


def test_linear_modules_with_names_of_experts_are_adapted_themselves(tmp_path):
    # peft alone adapts the joint experts of the other layer instead of this dense one
    model = load(save_tiny_model(tmp_path / "model", "qwen3_moe", mlp_only_layers=[0]))

    names = attach_adapters(model, config_of([], "all-linear"), OPTION)

    assert set(adapted_layers(model)) == set(names) and not adapted_parameters(model)
    assert {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")} < set(names)
    assert len(names) == 2 * 4 + 3


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_names_initial_values_outputs_and_gradients_are_those_of_peft(folder, targets, rslora):
    config = config_of(targets, use_rslora=rslora)
    model, base = load(folder), load(folder)(IDS).logits.detach()
    torch.manual_seed(3)
    attach_adapters(model, config, OPTION)
    theirs = with_peft(load(folder), config)

    own, expected = adapter_of(model), adapter_of(theirs)
    assert own.keys() == expected.keys() and len(own) == 2 * (2 * 2 + 2 * len(targets))
    assert all(torch.equal(own[name], expected[name]) for name in own)

    move(model), move(theirs)
    logits = model(IDS).logits
    assert torch.equal(logits, theirs(IDS).logits)
    assert (logits - base).abs().max() > 0.1
    for each in (model, theirs):
        each(IDS).logits.log_softmax(-1)[..., 0].sum().backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert gradients.keys() == own.keys()
    for name, param in theirs.named_parameters():
        if param.grad is not None:
            assert torch.equal(gradients[name.removeprefix("base_model.model.")], param.grad), name
    with adapters_disabled(model):
        assert torch.equal(model(IDS).logits, base)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_peft_and_this_project_load_each_others_adapters_bit_for_bit(folder, targets, tmp_path):
    config = config_of(targets, use_rslora=True)
    model = load(folder)
    attach_adapters(model, config, OPTION)
    move(model)
    own = adapter_of(model)
    names = [each.name for each in adapted_parameters(model)]
    AdapterFiles(config, adapted_layers(model), own, names).save_pretrained(tmp_path / "ours")

    theirs = peft.PeftModel.from_pretrained(load(folder), tmp_path / "ours", autocast_adapter_dtype=False)
    theirs.save_pretrained(tmp_path / "theirs")

    assert torch.equal(theirs(IDS).logits, model(IDS).logits)
    for saved in ("ours", "theirs"):
        back = load(folder)
        attach_adapters(back, read_adapter_config(tmp_path / saved, saved), OPTION)
        set_adapter(back, read_adapter(tmp_path / saved, saved), lambda name: name, saved)
        loaded = adapter_of(back)
        assert loaded.keys() == own.keys()
        assert all(torch.equal(loaded[name], own[name]) for name in own)
    written = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert written["target_parameters"] == sorted(names)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_folding_gives_the_weights_of_pefts_merge_in_either_layout(folder, family):
    build = gpt_oss if family == "gpt_oss" else lambda: load(folder)
    config = config_of([GATE_UP, DOWN])
    model, theirs = build(), with_peft(build(), config)
    attach_adapters(model, config, OPTION)
    move(model), move(theirs)

    parameters = adapted_parameters(model)
    folded = dict(fold(model.state_dict().items(), config, parameters))

    assert [each.is_transposed for each in parameters] == [family == "gpt_oss"] * 4
    assert torch.equal(model(IDS).logits, theirs(IDS).logits)
    expected = theirs.merge_and_unload().state_dict()
    assert folded.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(folded[name], tensor, atol=1e-6, rtol=0)


def test_what_is_trained_next_to_adapted_experts_is_found_by_its_own_name(folder):
    model = meta_model(load(folder).config)
    options = ModelConfig(train_modules=["0.mlp.experts"], freeze_modules=["layers.1"])

    select_trainable(model, options, "worker.actor.model", config_of([DOWN]))

    whole = [name for name, param in model.named_parameters() if param.requires_grad and not is_adapter(name)]
    assert whole == ["model.layers.0.mlp.experts.base_layer.gate_up_proj"]
    assert not any(param.requires_grad for name, param in model.named_parameters() if "layers.1." in name)


def test_the_plan_counts_the_adapters_of_experts_and_the_experts_without(folder):
    config = load(folder).config
    plain, adapted = meta_model(config), meta_model(config)
    select_trainable(plain, ModelConfig(), "worker.actor.model", config_of([]))
    select_trainable(adapted, ModelConfig(), "worker.actor.model", config_of([DOWN]))

    before, after = model_shape(plain), model_shape(adapted)

    assert (before.frozen_experts, after.frozen_experts) == (4, 2)
    # of each layer: 4 experts x rank 4, from 64 to 128
    assert after.trained - before.trained == 2 * 4 * 4 * (64 + 128)
    # The sum of weights and adapters, and its gradient, of one layer at a time in bf16.
    setup, batch = ModelSetup("cpu", 1, c=2), MicroBatch(tokens=64, responses=8)
    bare = replace(after, text=replace(after.text, adapted_experts=0))
    assert after.text.adapted_experts == 4 * 64 * 128 and before.text.adapted_experts == 0
    assert log_prob_peak(after, setup, batch) - log_prob_peak(bare, setup, batch) == 2 * 4 * 64 * 128
    assert update_peak(after, setup, batch) - update_peak(bare, setup, batch) == 2 * 2 * 4 * 64 * 128
