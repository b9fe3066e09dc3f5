# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.causal_families import FAMILIES, build_family
from verl.models.deferred_logits import DeferredLogits
from verl.models.families.interface import MediaFamily
from verl.models.families.registry import family_of
from verl.models.hub_names import auto_class
from verl.models.registry import check_model, prepare_model
from verl.models.tiny import save_tiny_model

SMALL = dict(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
)  # fmt: skip


def build(model_type, **overrides):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL | overrides)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("cohere", {"logit_scale": 0.3}),
        (
            "granite",
            {
                "logits_scaling": 4.0,
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.5,
            },
        ),
        ("gemma2", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "sliding_window": 8}),
        ("phi", {}),  # a biased head
        ("phi3", {"sliding_window": 8}),
        ("olmo2", {}),
        ("glm4", {}),
        ("smollm3", {}),
        ("starcoder2", {"sliding_window": 8}),
        ("mixtral", {"sliding_window": 8, "num_local_experts": 4}),
        ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4}),
        ("llama4_text", {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 32}),
        ("stablelm", {}),
        ("nemotron", {}),
    ],
)
def test_models_without_an_entry_pass_the_self_check(model_type, overrides):
    model = build(model_type, **overrides)
    prepare_model(model)

    assert check_model(model) < 1e-4


@pytest.mark.parametrize(
    ("model_type", "overrides", "message"),
    [
        ("qwen3_moe", {"output_router_logits": True, "num_experts": 4}, "output_router_logits` to false"),
        ("phimoe", {"num_local_experts": 4, "sliding_window": 8}, "does not pass its sliding window"),
        ("bloom", {}, "does not use transformers' attention interface"),
    ],
)
def test_unsupported_model_features_are_refused_by_name(model_type, overrides, message):
    model = build(model_type, **overrides)

    with pytest.raises(NotImplementedError, match=message):
        prepare_model(model)
        check_model(model)


class ShiftedHead(nn.Linear):
    """A custom head."""


def test_a_head_of_another_kind_is_refused():
    model = build("llama")
    model.lm_head = ShiftedHead(32, 128, bias=False)

    with pytest.raises(NotImplementedError, match="has a ShiftedHead as its head"):
        prepare_model(model)


def test_the_self_check_detects_unknown_behavior():
    model = build("llama")
    prepare_model(model)
    attention = model.model.layers[0].self_attn
    original = attention.forward

    def offset_by_position(hidden_states, *args, **kwargs):  # of the packed sequence, not of the row
        position = torch.arange(hidden_states.shape[1]).view(1, -1, 1)
        return original(hidden_states + 0.1 * position, *args, **kwargs)

    attention.forward = offset_by_position

    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM \(llama\) computes something"):
        check_model(model)


def test_a_prepared_model_keeps_its_class_name_parameters_and_own_config():
    first = build("qwen2")
    names = list(first.state_dict())
    second = AutoModelForCausalLM.from_config(first.config, attn_implementation="sdpa")

    prepare_model(first)

    assert type(first).__name__ == "Qwen2ForCausalLM"
    assert list(first.state_dict()) == names
    assert second.config._attn_implementation == "sdpa"
    assert second(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 128)


@pytest.mark.parametrize("model_type", ["qwen2", "bamba", "qwen3_next"])  # attention, a state, a delta rule
def test_a_model_that_is_prepared_twice_is_prepared_once(model_type):
    model = build_family(model_type, FAMILIES[model_type])
    prepare_model(model)
    once = [(type(module), len(module._forward_pre_hooks)) for module in model.modules()]

    prepare_model(model)

    assert [(type(module), len(module._forward_pre_hooks)) for module in model.modules()] == once
    assert check_model(model) < 1e-4


def test_vision_language_models_are_recognized_by_their_config(tmp_path):
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path, "qwen2_5_vl"))

    assert family_of(config).position_rows == 4
    assert not isinstance(family_of(build("llama").config), MediaFamily)


def test_the_vision_tower_runs_all_images_through_one_packed_attention_per_layer(tmp_path, monkeypatch):
    from verl.models.attention import layouts

    folder = save_tiny_model(tmp_path, "qwen2_vl")
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    prepare_model(model)
    calls = []
    original = layouts.attend_runs
    monkeypatch.setattr(
        layouts, "attend_runs", lambda *args: calls.append(args[-1].is_causal) or original(*args)
    )

    check_model(model)

    assert calls == [False, False, True, True]  # two layers of the tower, two of the language model


def test_deferred_logits_record_scales_and_a_soft_cap_in_any_order():
    # 2 * 5 * tanh((3 x) / 4 / 5) = 10 tanh(0.15 x): cap 10, scale 1.5.
    logits = torch.tanh((DeferredLogits(None, None) * 3 / 4).float() / 5) * 5 * 2

    assert logits.transform == pytest.approx((1.5, 10.0, 1.0))


@pytest.mark.parametrize(
    "change",
    [torch.relu, lambda z: z * torch.ones(3), lambda z: z[..., :3], lambda z: torch.tanh(torch.tanh(z))],
)
def test_other_operations_on_logits_are_refused(change):
    with pytest.raises((NotImplementedError, TypeError)):
        change(DeferredLogits(None, None))
