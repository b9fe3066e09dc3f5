# SPDX-License-Identifier: Apache-2.0
"""Sizes of tiny models: 0.8 M parameters, which vLLM's CPU kernels take (heads of at least 32)."""

from typing import Any

TEXT = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=4096, initializer_range=0.08,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)

# A layer of linear attention and one of full attention, half of whose channels rotate.
HYBRID = dict(
    linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
HYBRID_MOE = MOE | dict(shared_expert_intermediate_size=64)
HALF_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


def mrope(section: list[int], **extra: Any) -> dict[str, Any]:
    """Return options of M-RoPE whose sections add up to half of the head's dimension."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **extra}}
