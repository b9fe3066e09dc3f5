# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of transformers' causal language models, by model type."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL: dict[str, Any] = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, initializer_range=0.1,
)  # fmt: skip
WINDOW = {"sliding_window": 8}  # shorter than the rows
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
ALTERNATING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

RECORDED_LATER = "deepseek_v3", "glm4_moe", "granitemoe", "hunyuan_v1_moe", "lfm2_moe", "solar_open"
recorded_later = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.19"), reason="transformers does not record these routers"
)

# Overrides of the config: model types whose rows are packed and share prompts.
# Types of every suite, a layer of each kind; tests of the others are nightly.
EVERY_TIME = "llama", "gpt2", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "olmo_hybrid", "llama4_text"
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, **ALTERNATING},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {**ALTERNATING, "logit_scale": 0.3},
    "cwm": ALTERNATING,
    "deepseek_v2": {**ROUTED, **LATENT},
    "deepseek_v3": {**ROUTED, **LATENT},
    "diffllama": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": ALTERNATING,
    "flex_olmo": EXPERTS,
    "gemma": {},
    "gemma2": {**ALTERNATING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {**ALTERNATING, "query_pre_attn_scalar": 16},
    "glm": {},
    "glm4": {},
    "glm4_moe": ROUTED,
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {**LOCAL_EXPERTS, **ALTERNATING},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granitemoe": LOCAL_EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jetmoe": {"num_local_experts": 4},
    "laguna": {**EXPERTS, **ALTERNATING},
    "llama": {},
    "llama4_text": {
        **LOCAL_EXPERTS, "attention_chunk_size": 8, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0],
    },
    "minimax_m2": LOCAL_EXPERTS,
    "ministral": ALTERNATING,
    "ministral3": WINDOW,
    "mistral": WINDOW,
    "mixtral": {**LOCAL_EXPERTS, **WINDOW},
    "modernbert-decoder": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": WINDOW,
    "phimoe": LOCAL_EXPERTS,
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": ROUTED,
    "stablelm": {},
    "starcoder2": WINDOW,
    "vaultgemma": {**ALTERNATING, "query_pre_attn_scalar": 16},
}  # fmt: skip

MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_n_groups": 1}
HALF = {"layer_types": ["linear_attention", "full_attention"]}

# Model types with layers that run whole rows.
FAMILIES |= {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_d_head": 8},
    "granitemoehybrid": {**MAMBA, **LOCAL_EXPERTS, **HALF, "shared_intermediate_size": 32},
    "jamba": {
        "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 8, "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "minimax": {**LOCAL_EXPERTS, **HALF, "block_size": 8},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip

# Model types that are refused: overrides, and a part of the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({}, "does not use transformers' attention interface"),
    "doge": ({}, "builds an attention mask of its own"),
    "mamba2": ({"num_heads": 8, "n_groups": 1}, "does not use transformers' attention interface"),
    "mpt": ({}, "does not use transformers' attention interface"),
    "recurrent_gemma": (
        {"lru_width": 64, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
        "convolves tokens in RecurrentGemmaDecoderLayer",
    ),
}


def build_family(model_type: str, overrides: dict[str, Any]) -> PreTrainedModel:
    """Return the tiny model, random but always the same, in float32 and evaluation mode."""
    config = AutoConfig.for_model(model_type, **{**SMALL, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    return model.eval()


def with_recorded_routers(names: Iterable[str]) -> list[Any]:
    """Return a test's parameters, without the mixtures whose routers this transformers does not record."""
    return [pytest.param(name, marks=[recorded_later] * (name in RECORDED_LATER)) for name in names]
