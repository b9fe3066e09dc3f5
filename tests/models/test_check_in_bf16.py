# SPDX-License-Identifier: Apache-2.0
"""The check of a model at its start, in bfloat16: rounding is no error, and what is wrong is still found."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.models import registry
from verl.models.registry import FLOOR, check_model, prepare_model
from verl.models.tiny import save_tiny_model

FORMER_BOUND = 0.15


def in_bf16(folder, family, scale, **overrides):
    """A model whose weights are `scale` times larger: the larger, the more its rounding matters."""
    model = AutoModelForCausalLM.from_pretrained(
        save_tiny_model(folder, family, **overrides), dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)
    prepare_model(model)
    return model


def slow_rotation(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def no_norm(model):
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda _, inputs, output: inputs[0])


def swapped_heads(model):
    weight = model.model.layers[0].self_attn.o_proj.weight.data
    first, second, *rest = weight.split(weight.shape[1] // model.config.num_attention_heads, dim=1)
    weight.copy_(torch.cat([second, first, *rest], dim=1))


def swapped_experts(model):
    for weights in model.model.layers[0].mlp.experts.parameters():
        weights.data[:2] = weights.data[:2].flip(0)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "qwen3_5_text"])
@pytest.mark.parametrize("scale", [1, 3])
def test_rounding_alone_passes(tmp_path, family, scale):
    assert check_model(in_bf16(tmp_path, family, scale)) > 0


def test_a_deep_model_may_round_more_than_a_fixed_bound_would_allow(tmp_path):
    difference = check_model(in_bf16(tmp_path, "llama", 4, seed=1, num_hidden_layers=16))

    assert difference > FORMER_BOUND > 4 * FLOOR[torch.bfloat16]


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("change", [slow_rotation, no_norm, swapped_heads, swapped_experts])
def test_a_packed_pass_that_computes_something_else_is_found(tmp_path, monkeypatch, change, scale):
    model = in_bf16(tmp_path, "qwen3_moe", scale)
    packed, wrong = registry._packed, deepcopy(model)
    change(wrong)
    monkeypatch.setattr(registry, "_packed", lambda model, *inputs: packed(wrong.eval(), *inputs))

    message = r"log-probabilities differ by .* at most .* is allowed"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=message):
        check_model(model)
