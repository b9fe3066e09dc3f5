# SPDX-License-Identifier: Apache-2.0
"""Caches of an engine for each kind of layer: published shapes by hand, and pages of vLLM's own specs."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from tests.planning.planning import STACK
from tests.virtual.shapes import SHAPES
from verl.planning.layer_caches import layer_caches
from verl.planning.layer_sizes import LayerCache

BLOCK = 16  # tokens of a page
PUBLISHED = {  # by model on the Hub, with the type of its config
    "Qwen2-7B": ("qwen2", SHAPES["7b"][1]),
    "Qwen3.5-27B": SHAPES["qwen3.5-27b"],
    "Qwen3-Next-80B-A3B": ("qwen3_next", {}),
    "DeepSeek-V3": SHAPES["671b"],
    "gpt-oss-120b": SHAPES["gpt-oss-120b"],
    "Gemma 3": ("gemma3_text", {}),
    "Gemma 4": ("gemma4_text", {}),
    "Llama 4": ("llama4_text", {}),
    "Nemotron-3-Nano-30B-A3B": (
        "nemotron_h",
        dict(
            layer_types=["linear_attention"] * 23 + ["moe"] * 23 + ["full_attention"] * 6, mamba_num_heads=64,
            num_key_value_heads=2,
        ),
    ),
    "granite-4.0-h-small": (
        "granitemoehybrid",
        dict(
            hidden_size=4096, num_hidden_layers=40, num_key_value_heads=8, mamba_d_state=128,
            layer_types=["linear_attention"] * 36 + ["full_attention"] * 4,
        ),
    ),
    "Falcon-H1-7B": (
        "falcon_h1",
        dict(
            num_hidden_layers=44, hidden_size=3072, num_attention_heads=12, num_key_value_heads=2,
            head_dim=128, mamba_n_heads=24, mamba_d_head=128, mamba_d_ssm=3072,
        ),
    ),
    "Jamba": ("jamba", {}),
    "LFM2-1.2B": (
        "lfm2", dict(num_hidden_layers=16, hidden_size=2048, full_attn_idxs=[2, 5, 8, 10, 12, 14])
    ),
}  # fmt: skip
# Layers x the last inputs of a convolution (one less than its kernel), and layers x heads' matrices.
DELTA_INPUTS, DELTA_STATE = 48 * 3 * (2 * 16 * 128 + 48 * 128), 48 * 48 * 128 * 128
EXPECTED = {
    "Qwen2-7B": [LayerCache(28 * 2 * 4 * 128, 4)],
    "Qwen3.5-27B": [
        LayerCache(0, 16, state=DELTA_INPUTS, float32_state=DELTA_STATE),
        LayerCache(16 * 2 * 4 * 256, 4),
    ],
    "Qwen3-Next-80B-A3B": [
        LayerCache(0, 16, state=36 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))),
        LayerCache(12 * 2 * 2 * 256, 2),
    ],
    "DeepSeek-V3": [LayerCache(61 * (512 + 64))],  # 57 times less than 2 x 128 heads of 128
    "gpt-oss-120b": [LayerCache(18 * 2 * 8 * 64, 8, 128), LayerCache(18 * 2 * 8 * 64, 8)],
    "Gemma 3": [LayerCache(22 * 2 * 4 * 256, 4, 4096), LayerCache(4 * 2 * 4 * 256, 4)],
    # Wider heads in full layers.
    "Gemma 4": [LayerCache(25 * 2 * 4 * 256, 4, 512), LayerCache(5 * 2 * 4 * 512, 4)],
    "Llama 4": [LayerCache(36 * 2 * 8 * 128, 8, 8192), LayerCache(12 * 2 * 8 * 128, 8)],
    "Nemotron-3-Nano-30B-A3B": [
        LayerCache(0, 64, state=23 * 3 * (64 * 64 + 2 * 8 * 128), float32_state=23 * 64 * 64 * 128),
        LayerCache(6 * 2 * 2 * 128, 2),
    ],
    "granite-4.0-h-small": [
        LayerCache(0, 128, state=36 * (3 * (128 * 64 + 2 * 128) + 128 * 64 * 128)),
        LayerCache(4 * 2 * 8 * 128, 8),
    ],
    # Each layer has both.
    "Falcon-H1-7B": [
        LayerCache(0, 24, state=44 * (3 * (3072 + 2 * 256) + 3072 * 256)),
        LayerCache(44 * 2 * 2 * 128, 2),
    ],
    "Jamba": [LayerCache(0, 8192, state=28 * (3 * 8192 + 8192 * 16)), LayerCache(4 * 2 * 8 * 128, 8)],
    "LFM2-1.2B": [LayerCache(0, 2048, state=10 * 2 * 2048), LayerCache(6 * 2 * 8 * 64, 8)],
}  # fmt: skip


def config_of(name):
    kind, fields = PUBLISHED[name]
    return AutoConfig.for_model(kind, **fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_kind_of_layer_keeps_what_its_model_publishes(name):
    assert list(layer_caches(config_of(name))) == EXPECTED[name]


def test_layers_that_read_the_cache_of_others_keep_none():
    text = AutoConfig.for_model("gemma4_text", num_kv_shared_layers=20)

    assert sum(cache.numbers for cache in layer_caches(text)) == 9 * 2 * 4 * 256 + 2 * 4 * 512


def test_a_sequence_of_a_hybrid_model_keeps_mostly_its_state():
    stack = replace(STACK, caches=layer_caches(config_of("Qwen3.5-27B")))

    # 151 MB in float32 and 3 MB in bfloat16 of the state, and 64 KiB of a token in the 16 full layers.
    assert stack.cached(2, 0) == 150_994_944 + 2_949_120
    assert stack.cached(2, 1000) - stack.cached(2, 0) == 1000 * 65_536


def vllm_pages(text):
    """Bytes of a block of 16 tokens, or of a state, in bfloat16, by the specs that vLLM's layers give."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    from verl.models.layer_configs import layer_heads

    pages = {"state": 0, "window": 0, "full": 0}
    for kind, heads in zip(text.layer_types, layer_heads(text), strict=True):
        if getattr(text, "kv_lora_rank", None):
            size = text.kv_lora_rank + text.qk_rope_head_dim
            spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=size, dtype=torch.bfloat16)
        elif kind == "linear_attention":
            shapes, dtypes = vllm_state(text)
            spec = MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=dtypes)
        else:
            sizes = dict(num_kv_heads=heads.keys, head_size=heads.dim, dtype=torch.bfloat16)
            has_window = kind == "sliding_attention"
            window = dict(sliding_window=text.sliding_window) if has_window else {}
            cls = SlidingWindowSpec if has_window else FullAttentionSpec
            spec = cls(block_size=BLOCK, **sizes, **window)
        name = {"linear_attention": "state", "sliding_attention": "window"}.get(kind, "full")
        pages[name] += spec.page_size_bytes
    return pages


def vllm_state(text):
    from vllm.model_executor.layers.mamba.mamba_utils import (
        MambaStateDtypeCalculator,
        MambaStateShapeCalculator,
    )

    if text.model_type == "nemotron_h":
        shapes = MambaStateShapeCalculator.mamba2_state_shape(
            tp_world_size=1, intermediate_size=text.mamba_num_heads * text.mamba_head_dim,
            n_groups=text.n_groups, num_heads=text.mamba_num_heads, head_dim=text.mamba_head_dim,
            state_size=text.ssm_state_size, conv_kernel=text.conv_kernel,
        )  # fmt: skip
        state_dtype = text.mamba_ssm_cache_dtype
    else:
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            1, text.linear_num_key_heads, text.linear_num_value_heads, text.linear_key_head_dim,
            text.linear_value_head_dim, text.linear_conv_kernel_dim,
        )  # fmt: skip
        state_dtype = getattr(text, "mamba_ssm_dtype", "auto")
    dtypes = MambaStateDtypeCalculator.mamba2_state_dtype(torch.bfloat16, "auto", state_dtype)
    return shapes, dtypes


@pytest.mark.heavy
@pytest.mark.nightly("verl/planning")
def test_the_plan_counts_the_pages_of_the_specs_of_vllm():
    names = "Qwen2-7B", "Qwen3.5-27B", "Qwen3-Next-80B-A3B", "gpt-oss-120b", "Gemma 4", "DeepSeek-V3"
    for name in (*names, "Nemotron-3-Nano-30B-A3B"):
        text = config_of(name)
        if not getattr(text, "layer_types", None):
            text.layer_types = ["full_attention"] * text.num_hidden_layers

        planned = {"state": 0, "window": 0, "full": 0}
        for cache in layer_caches(text):
            kind = "full" if math.isinf(cache.window) else "window"
            planned[kind if cache.numbers else "state"] += (
                2 * (BLOCK * cache.numbers + cache.state) + 4 * cache.float32_state
            )

        kinds = [kind for kind in text.layer_types if kind not in ("moe", "mlp")]
        text.layer_types, text.num_hidden_layers = kinds, len(kinds)
        assert planned == vllm_pages(text), name
