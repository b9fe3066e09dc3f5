# SPDX-License-Identifier: Apache-2.0
"""Caches of a sequence in each kind of layer of a rollout engine, from a model's config alone.

Sizes are those of vLLM's specs (`vllm.v1.kv_cache_interface`): pages of a sliding window are freed behind it,
latent attention keeps one vector for all heads, and a recurrent layer keeps a state of constant size.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from verl.models.layer_configs import LayerHeads, layer_heads
from verl.planning.layer_sizes import LayerCache

# Layers of these kinds have no attention, or have it in addition to a state.
STATELESS, RECURRENT, BOTH = ("moe", "mlp"), ("linear_attention", "conv"), "hybrid"
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
STATE_DTYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")  # as Qwen3.5 and Nemotron-H name it


class _Mamba(NamedTuple):
    """Options of a config for the sizes of Mamba-2 layers."""

    heads: str
    dim: str  # of a head
    groups: str  # of heads that share their input and output matrices
    state: str
    kernel: str  # of the convolution


MAMBA_2 = (
    _Mamba("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    _Mamba("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
)


def layer_caches(text: Any) -> tuple[LayerCache, ...]:
    """Return the caches of the layers of a language model's config, by kind.

    A kind that is not known counts as full attention, which keeps more of a long sequence.
    """
    default = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    kinds = getattr(text, "layer_types", None) or [default] * text.num_hidden_layers
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)  # others read these
    layers = list(zip(kinds, layer_heads(text), strict=True))[:own]
    counts = Counter(cache for kind, heads in layers for cache in _caches_of(text, kind, heads))
    return tuple(
        replace(
            cache,
            numbers=number * cache.numbers,
            state=number * cache.state,
            float32_state=number * cache.float32_state,
        )
        for cache, number in counts.items()
    )


def _caches_of(text: Any, kind: str, heads: LayerHeads) -> Iterator[LayerCache]:
    if kind in STATELESS:
        return
    state = _state(text, kind) if kind == BOTH or kind in RECURRENT else None
    if state is not None:
        yield state
    if state is None or kind == BOTH:
        yield _attention(text, kind, heads)


def _attention(text: Any, kind: str, heads: LayerHeads) -> LayerCache:
    if getattr(text, "kv_lora_rank", None):  # of all heads, and the rotated part of the keys
        return LayerCache(text.kv_lora_rank + text.qk_rope_head_dim)
    window = getattr(text, WINDOWS[kind]) if kind in WINDOWS else math.inf
    return LayerCache(2 * heads.keys * heads.dim, heads.keys, window)


def _state(text: Any, kind: str) -> LayerCache | None:
    """Return the state of a recurrent layer: last inputs of its convolution, and the recurrence's matrix."""
    if kind == "conv":  # that of LFM2 has no recurrence
        return LayerCache(0, text.hidden_size, state=(text.conv_L_cache - 1) * text.hidden_size)
    if getattr(text, "linear_num_value_heads", None):  # gated delta rule
        keys, dim = text.linear_num_key_heads, text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        return _recurrence(text, keys, text.linear_conv_kernel_dim, 2 * keys * dim + values, values * dim)
    for names in MAMBA_2:
        if getattr(text, names.heads, None):
            heads, dim, groups, size, kernel = (getattr(text, name) for name in names)
            return _recurrence(text, heads, kernel, heads * dim + 2 * groups * size, heads * dim * size)
    if getattr(text, "mamba_dt_rank", None):  # Mamba-1: each channel is a head
        width = text.mamba_expand * text.hidden_size
        return _recurrence(text, width, text.mamba_d_conv, width, width * text.mamba_d_state)
    return None


def _recurrence(text: Any, heads: int, kernel: int, convolved: int, matrix: int) -> LayerCache:
    inputs = (kernel - 1) * convolved
    if any(getattr(text, name, None) == "float32" for name in STATE_DTYPES):
        return LayerCache(0, heads, state=inputs, float32_state=matrix)
    return LayerCache(0, heads, state=inputs + matrix)
