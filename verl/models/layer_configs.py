# SPDX-License-Identifier: Apache-2.0
"""Sizes of a language model's layers that configs name differently: heads of each layer, and experts."""

from typing import Any, NamedTuple

# Options of configs for the number of experts that a token is sent to.
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
# Options for the number of experts that a layer's router chooses among.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class LayerHeads(NamedTuple):
    """Attention heads of a layer."""

    queries: int
    keys: int  # and values
    dim: int


def layer_heads(text: Any) -> list[LayerHeads]:
    """Return the heads of each layer of a language model's config."""
    if not getattr(text, "is_heterogeneous", False):
        return [_heads(text)] * text.num_hidden_layers
    return [_heads(layer) for layer in text.per_layer_config]


def experts_per_token(text: Any) -> int:
    """Return the experts that a token passes in a layer; 0 in dense models."""
    return next((getattr(text, name) for name in TOP_K if getattr(text, name, None)), 0)


def experts_per_layer(text: Any) -> int:
    """Return the experts that a layer's router chooses among; 0 in dense models."""
    return next((getattr(text, name) for name in EXPERTS if getattr(text, name, None)), 0)


def _heads(config: Any) -> LayerHeads:
    queries = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    return LayerHeads(queries, keys, getattr(config, "head_dim", None) or config.hidden_size // queries)
