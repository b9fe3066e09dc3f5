# SPDX-License-Identifier: Apache-2.0
"""The attention function of all prepared transformers models and vision towers.

`packed_attention` is registered in transformers' attention interface. It delegates to the layout of the
packed sequences: `packed_layout` in language models, `cu_seq_lens_q` in vision towers. Requests that
`AttentionRule` does not cover are refused by name.

Some models' blocks do not pass keyword arguments on to their attention, and some attention computes with the
index of a token in the sequence, which in a packed sequence is not its position. For these, hooks on the
blocks keep the inputs of the one that is running, in forward and when checkpointing runs a block again.
"""

import inspect
import sys
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.models.attention.kernels import CHUNKED, FULL, LAYER_TYPES, SLIDING, AttentionRule
from verl.models.attention.layouts import Layout, PackedLayout

ATTENTION = "verl_packed"
# With "flash" in the name, vision towers make one call with `cu_seqlens` instead of one for each image.
VISION_ATTENTION = "verl_packed_flash"

# Layers with attention next to a layer with a state.
IN_HYBRIDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}

# Keywords that models pass to every attention function and that have no effect here.
HARMLESS = frozenset({
    "position_ids", "use_cache", "cache_position", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "max_seqlen", "return_dict", "output_hidden_states", "num_items_in_batch", "is_first_iteration",
    "logits_to_keep",
})  # fmt: skip


@torch.compiler.disable  # a compiled block would be compiled again for each layout
def packed_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, N, D); keys and values (1, Hkv, N, D)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,  # 1 / sqrt(D) by default
    dropout: float = 0.0,
    is_causal: bool | None = None,  # the module's attribute by default
    sliding_window: int | None = None,  # keys that a query attends to, including itself
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # (H,) sinks
    packed_layout: Layout | None = None,  # of a language model
    cu_seq_lens_q: Tensor | None = None,  # (B + 1,) of a vision tower
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention over packed sequences, (1, N, H, D), with the signature that transformers expects."""
    name = type(module).__name__
    obstacle = _obstacle(module, attention_mask, dropout, sliding_window, others)
    if obstacle is not None:
        raise NotImplementedError(f"{name} {obstacle}")
    layout = packed_layout if cu_seq_lens_q is None else PackedLayout.of(cu_seq_lens_q, query.device)
    if layout is None and (block := running_block()) is not None:
        layout = block.layout
    if layout is None:
        raise NotImplementedError(
            f"{name} got no sequence boundaries: call the prepared model with `cu_seqlens` and `read`;"
            " a model that does not pass keyword arguments on to attention cannot be packed"
        )
    causal = bool(module.is_causal if is_causal is None else is_causal)
    if sliding_window is not None and not causal:
        raise NotImplementedError(f"{name}: a two-sided sliding window is not supported under packing")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kind = _layer_type(module)
    config: Any = getattr(module, "config", None)
    chunk = config.attention_chunk_size if kind == CHUNKED else None
    rule = AttentionRule(scale, causal, sliding_window, softcap, kind, chunk)
    return layout.attend(at_positions(query, module), key, value, rule, s_aux), None


def _layer_type(module: nn.Module) -> str:
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    kind = FULL if layer_types is None or index is None else layer_types[index]
    return IN_HYBRIDS.get(kind, kind)


def _has_window_in_mask(module: Any) -> bool:
    """Return whether the model has no types of layers and a window that is in its masks alone."""
    config: Any = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "layer_types", None) is not None:
        return False
    file = sys.modules[type(module).__module__]
    return hasattr(file, "create_sliding_window_causal_mask") and window < config.max_position_embeddings


def _obstacle(
    module: nn.Module, mask: Tensor | None, dropout: float, window: int | None, others: dict[str, Any]
) -> str | None:
    """Describe an unsupported request, which would otherwise be dropped silently."""
    if mask is not None:
        return "builds an attention mask of its own, which packed attention would drop"
    if dropout > 0:
        return (
            f"uses attention dropout ({dropout}), which is not supported under packing:"
            " set `worker.actor.model.override_config.attention_dropout` to 0"
        )
    given = {key for key, value in others.items() if value is not None and value is not False}
    unknown = sorted(given - HARMLESS)
    if unknown:
        return f"passes {', '.join(unknown)} to attention, which packed attention does not support"
    kind = _layer_type(module)
    if kind not in LAYER_TYPES:
        return f"uses {kind} in layer {module.layer_idx}, which packed attention does not support"
    if window is None and (kind == SLIDING or _has_window_in_mask(module)):
        return "does not pass its sliding window to attention, which would drop it"
    return None


def calls_attention(module: nn.Module) -> bool:
    """Return whether a module looks up attention where it was registered: some models do not say that."""
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, FunctionType) and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


class BlockInputs(NamedTuple):
    """Arguments of a block in a packed forward pass."""

    layout: Layout
    position_ids: Tensor | None  # (1, N)


_running: ContextVar[BlockInputs | None] = ContextVar("block_inputs", default=None)


def running_block() -> BlockInputs | None:
    """Return the inputs of the block that runs in this thread; None outside of packed blocks."""
    return _running.get()


def record_block_inputs(model: nn.Module) -> None:
    """Make the inputs of the model's blocks available to their attention."""
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer):
            block.register_forward_pre_hook(_enter, with_kwargs=True)
            block.register_forward_hook(_leave, with_kwargs=True, always_call=True)


def _enter(_block: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
    layout = kwargs.get("packed_layout")
    if layout is not None:
        _running.set(BlockInputs(layout, kwargs.get("position_ids")))


def _leave(_block: nn.Module, _args: tuple, kwargs: dict[str, Any], _out: Any) -> None:
    if "packed_layout" in kwargs:
        _running.set(None)


def at_positions(query: Tensor, module: Any) -> Tensor:
    """Scale queries (1, H, N, D) by their position where the model scaled them by their index.

    Llama 4's layers without rotary positions multiply queries by

        log(1 + floor((index + 1) / floor_scale)) x attn_scale + 1
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    block = running_block()
    if block is None or block.position_ids is None:
        raise NotImplementedError(
            f"{type(module).__name__} scales queries by their position, which its block does not get"
        )
    index = torch.arange(query.shape[2], device=query.device)
    right, applied = (_temperature(positions, module) for positions in (block.position_ids[0], index))
    return query * (right / applied).to(query.dtype)[:, None]


def _temperature(positions: Tensor, module: Any) -> Tensor:
    steps = torch.floor((positions.float() + 1) / module.floor_scale)
    return torch.log1p(steps) * module.attn_scale + 1


for _name in (ATTENTION, VISION_ATTENTION):
    AttentionInterface.register(_name, packed_attention)
