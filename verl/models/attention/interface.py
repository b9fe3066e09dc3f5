# SPDX-License-Identifier: Apache-2.0
"""Attention over packed tokens, in one place for every transformers model and for the vision towers.

`packed_attention` is registered in transformers' attention interface. It takes the layout of the tokens from
the keyword `packed_layout` (language models) or makes it of `cu_seq_lens_q` (vision towers), and asks it to
`attend`; see `verl.models.attention.layouts`.

What a model asks of attention beyond `AttentionRule` is refused by name.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from verl.models.attention.layouts import Layout, PackedLayout
from verl.models.attention.row_attention import AttentionRule

ATTENTION = "verl_packed"
# With "flash" in the name, vision towers make one call with row boundaries instead of one for each image.
VISION_ATTENTION = "verl_packed_flash"

# Keywords that models hand to every attention function and that change nothing here.
HARMLESS = frozenset({
    "position_ids", "use_cache", "cache_position", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "max_seqlen", "return_dict", "output_hidden_states", "num_items_in_batch", "is_first_iteration",
})  # fmt: skip


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_layout: Layout | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, over one line of packed tokens.

    Args:
        module: The attention module that calls; named in errors.
        query: (1, H, N, D).
        key: (1, Hkv, N, D); Hkv divides H.
        value: (1, Hkv, N, D).
        attention_mask: None: the row boundaries say it all.
        scaling: Of the scores; 1 / sqrt(D) by default.
        dropout: Zero.
        is_causal: Whether tokens see only earlier ones; the module's own attribute by default.
        sliding_window: Keys a query sees, itself included.
        softcap: Soft cap of the scores.
        packed_layout: Which tokens see which, in a language model.
        cu_seq_lens_q: (rows + 1,) row boundaries of a vision tower.
        **others: What else the model hands over; anything that would change the result is refused.

    Returns:
        (1, N, H, D), and no attention weights.

    Raises:
        NotImplementedError: The model asks for something that packed attention does not do.
    """
    name = type(module).__name__
    _refuse_unknown(module, attention_mask, dropout, sliding_window, others)
    layout = packed_layout if cu_seq_lens_q is None else PackedLayout.of(cu_seq_lens_q)
    if layout is None:
        raise NotImplementedError(
            f"{name} got no row boundaries: call the prepared model with `cu_seqlens` and `targets`;"
            " a model that does not pass keyword arguments on to attention cannot be packed"
        )
    causal = bool(module.is_causal if is_causal is None else is_causal)
    if sliding_window is not None and not causal:
        raise NotImplementedError(f"{name}: a sliding window over both sides is not supported under packing")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(query, key, value, AttentionRule(scale, causal, sliding_window, softcap)), None


def _refuse_unknown(
    module: nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    sliding_window: int | None,
    others: dict[str, Any],
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise NotImplementedError(
            f"{name} builds an attention mask of its own, which packed attention would drop"
        )
    if dropout > 0:
        raise NotImplementedError(
            f"{name}: attention dropout ({dropout}) is not supported under packing:"
            " set `worker.actor.model.override_config.attention_dropout` to 0"
        )
    unknown = sorted(
        key
        for key, value in others.items()
        if key not in HARMLESS and value is not None and value is not False
    )
    if unknown:
        raise NotImplementedError(
            f"{name} asks attention for {', '.join(unknown)}, which packed attention does not do"
        )
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if layer_types is None or index is None:
        return
    if layer_types[index] not in ("full_attention", "sliding_attention"):
        raise NotImplementedError(
            f"{name}: packed attention does not do {layer_types[index]} (layer {index})"
        )
    if layer_types[index] == "sliding_attention" and sliding_window is None:
        raise NotImplementedError(
            f"{name} does not say the sliding window of layer {index}, so it would be dropped"
        )


for _name in (ATTENTION, VISION_ATTENTION):
    AttentionInterface.register(_name, packed_attention)
