# SPDX-License-Identifier: Apache-2.0
"""Where adapters go, what they start from, and what of a model is trained."""

import pytest
import torch
from transformers import AutoConfig

from verl.config.model import ModelConfig
from verl.models.hub_names import HubNames, meta_model
from verl.models.lora import adapted_layers, adapters_disabled, attach_adapters, set_adapter
from verl.models.lora_weights import AdapterConfig, is_adapter
from verl.models.scalar_head import make_scalar
from verl.models.tiny import save_tiny_model
from verl.models.trainable import select_trainable
from verl.planning.model_sizes import model_shape

OPTION = "worker.actor.model"
ALL = AdapterConfig(rank=4, alpha=8, target_modules="all-linear")
TEXT_LINEAR = 2 * 7  # layers, linear modules in each
TOWER_LINEAR = 2 * 5 + 2  # blocks, and the two of the merger


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return AutoConfig.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))


@pytest.fixture
def model(config):
    return meta_model(config)


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("target", "exclude", "count"),
    [
        ("all-linear", None, TEXT_LINEAR + TOWER_LINEAR),
        ("all-linear", ".*visual.*", TEXT_LINEAR),
        ("q_proj,v_proj", None, 4),
        ("self_attn.q_proj", None, 2),
        (r".*layers\.1\..*_proj", None, 7),
        (r"model\.visual\..*", "qkv,proj", TOWER_LINEAR - 4),
    ],
)
def test_patterns_select_the_adapted_modules(model, target, exclude, count):
    names = attach_adapters(model, AdapterConfig(4, 8, target, exclude), f"{OPTION}.lora")

    assert len(names) == count
    assert set(adapted_layers(model)) == set(names)
    assert trained(model) == {name for name, _ in model.named_parameters() if is_adapter(name)}


def test_the_head_is_never_adapted(model):
    attach_adapters(model, ALL, f"{OPTION}.lora")

    assert "lm_head" not in adapted_layers(model)
    with pytest.raises(
        ValueError, match=r"`worker.actor.model.lora.target_modules` \(lm_head\) matches no linear"
    ):
        attach_adapters(model, AdapterConfig(4, 8, "lm_head"), f"{OPTION}.lora")


@pytest.mark.parametrize(
    ("target", "exclude", "message"),
    [
        (
            "qproj",
            None,
            r"target_modules` \(qproj\) matches no linear module of Qwen2_5_VL.*; it has .*o_proj",
        ),
        ("embed_tokens", None, "matches no linear module"),
        ("(", None, r"target_modules` \(\(\) is not a regular expression: missing \)"),
        ("q_proj", "q_proj", r"exclude_modules` \(q_proj\) leaves no module of .*target_modules` \(q_proj\)"),
    ],
)
def test_patterns_that_select_nothing_are_errors_that_list_the_modules(model, target, exclude, message):
    with pytest.raises(ValueError, match=message):
        attach_adapters(model, AdapterConfig(4, 8, target, exclude), f"{OPTION}.lora")


def test_a_name_without_a_match_among_others_is_a_warning(model, caplog):
    names = attach_adapters(model, AdapterConfig(4, 8, "q_proj,vproj"), f"{OPTION}.lora")

    assert names and all(name.endswith(".q_proj") for name in names)
    assert [record.getMessage() for record in caplog.records] == [
        f"`{OPTION}.lora.target_modules` (q_proj,vproj): vproj matches no linear module of"
        f" {type(model).__name__} that can be adapted"
    ]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return AutoConfig.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe"))


@pytest.mark.parametrize(
    "target",
    ["gate_proj,up_proj,down_proj", "gate_up_proj", "mlp.experts", ".*experts.*", r".*\.experts\.\d+\..*"],
)
def test_patterns_that_select_only_joint_experts_are_refused(mixture, target):
    with pytest.raises(ValueError, match=r"names only experts, which Qwen3Moe.* holds as joint") as raised:
        attach_adapters(meta_model(mixture), AdapterConfig(4, 8, target), f"{OPTION}.lora")

    assert f"`{OPTION}.lora.target_modules` ({target})" in str(raised.value)
    assert "`train_modules`; it has k_proj, o_proj, q_proj, v_proj" in str(raised.value)


def test_a_pattern_without_a_match_is_not_taken_for_experts(mixture):
    with pytest.raises(ValueError, match=r"\(qproj\) matches no linear module of Qwen3Moe"):
        attach_adapters(meta_model(mixture), AdapterConfig(4, 8, "qproj"), f"{OPTION}.lora")


def test_experts_without_an_adapter_are_counted(config, mixture):
    # Of each of two layers `gate_up_proj` and `down_proj`.
    cases = (
        (mixture, [], ALL, 4),
        (mixture, [r"layers\.1\.mlp\.experts"], ALL, 2),
        (mixture, [], None, 0),
        (config, [], ALL, 0),
    )
    for shape_config, trained, adapter, count in cases:
        model = meta_model(shape_config)
        select_trainable(model, ModelConfig(train_modules=trained), OPTION, adapter)

        shape = model_shape(model)

        assert shape.frozen_experts == count
        said = f"; {count} joint tensors of experts are not, see `lora.target_parameters`"
        assert (said in shape.trained_text) == (count > 0)


def test_a_frozen_tower_is_not_adapted(model):
    select_trainable(model, ModelConfig(freeze_vision_tower=True), OPTION, ALL)

    assert len(adapted_layers(model)) == TEXT_LINEAR
    assert not [name for name in trained(model) if "visual" in name]


def test_without_patterns_everything_is_trained(model):
    select_trainable(model, ModelConfig(), OPTION)

    assert trained(model) == {name for name, _ in model.named_parameters()}


def test_patterns_select_trained_parameters_and_freezing_wins(model):
    options = ModelConfig(train_modules=[r"visual\.merger", r"layers\.1\."], freeze_modules=["bias"])

    select_trainable(model, options, OPTION)

    names = {name for name, _ in model.named_parameters()}
    wanted = {name for name in names if "visual.merger" in name or "layers.1." in name}
    assert trained(model) == {name for name in wanted if "bias" not in name}


def test_parameters_trained_with_adapters_are_float32(config):
    model = meta_model(config, torch.bfloat16)

    select_trainable(model, ModelConfig(train_modules=["embed_tokens"]), OPTION, ALL)

    assert "model.language_model.embed_tokens.weight" in trained(model)
    kinds = {(parameter.dtype, parameter.requires_grad) for parameter in model.parameters()}
    assert kinds == {(torch.float32, True), (torch.bfloat16, False)}


def test_the_score_of_an_adapted_value_model_is_trained(config):
    config = type(config)(**config.to_dict())
    make_scalar(config, has_bias=True)
    model = meta_model(config)

    select_trainable(model, ModelConfig(), "worker.critic.model", ALL)

    assert {"score.weight", "score.bias"} < trained(model)
    assert "score" not in adapted_layers(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ModelConfig(freeze_modules=["visaul"]), r"freeze_modules` \(visaul\) matches no parameter's name"),
        (ModelConfig(train_modules=["*"]), r"train_modules` \(\*\) is not a regular expression"),
        (ModelConfig(freeze_modules=["."]), r"freeze_modules` \(\['.'\]\) leaves nothing to train"),
    ],
)
def test_invalid_parameter_patterns_are_errors_that_name_the_option(model, options, message):
    with pytest.raises(ValueError, match=message):
        select_trainable(model, options, OPTION)


def test_disabled_adapters_have_no_effect_and_are_restored(tmp_path):
    model = meta_model(AutoConfig.from_pretrained(save_tiny_model(tmp_path, "qwen2"))).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        plain = model.model.layers[0].mlp(model.model.embed_tokens(ids))
        attach_adapters(model, ALL, OPTION)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                torch.nn.init.normal_(parameter)
        with adapters_disabled(model):
            without = model.model.layers[0].mlp(model.model.embed_tokens(ids))
        adapted = model.model.layers[0].mlp(model.model.embed_tokens(ids))

    assert torch.equal(without, plain)
    assert not torch.allclose(adapted, plain)
    assert trained(model) == {name for name, _ in model.named_parameters() if is_adapter(name)}


def with_memory(config):
    model = meta_model(config)
    names = attach_adapters(model, ALL, OPTION)
    return model.to_empty(device="cpu"), names


def test_saved_adapters_load_by_names_in_memory_and_on_the_hub(config):
    model, _ = with_memory(config)
    hub = HubNames(config)
    own = {
        name: torch.full_like(tensor, 3.0) for name, tensor in model.named_parameters() if is_adapter(name)
    }
    older = {}
    for name, tensor in own.items():
        module, _, rest = name.partition(".lora_")
        older[f"{hub.of_module(module)}.lora_{rest}"] = tensor
    assert not own.keys() & older.keys(), "this model's names on the hub differ from those in memory"

    for tensors in (own, older):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        set_adapter(model, tensors, hub.of_module, "it")

        assert all(
            bool((tensor == 3.0).all()) == is_adapter(name) for name, tensor in model.named_parameters()
        )


def test_an_adapter_for_a_different_base_is_an_error_that_shows_a_difference(config):
    model, _ = with_memory(config)
    own = {name: tensor.detach() for name, tensor in model.named_parameters() if is_adapter(name)}
    smaller = {name: tensor[:2] for name, tensor in own.items()}
    fewer = dict(list(own.items())[1:])

    for tensors, message in (
        (smaller, "in the adapter"),
        (fewer, "1 tensors differ"),
        ({}, "None in the adapter"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            set_adapter(model, tensors, HubNames(config).of_module, "`lora.path` (x)")
        assert str(raised.value).startswith("`lora.path` (x) is an adapter for a different model")
