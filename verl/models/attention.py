# SPDX-License-Identifier: Apache-2.0
"""Attention over packed tokens, in one place for every transformers model and for the vision towers.

`packed_attention` is registered in transformers' attention interface. It takes the row boundaries from the
keyword `packed_layout` (language models) or `cu_seq_lens_q` (vision towers) and hands over to `attend`,
which is where other layouts of the same work (sequence parallelism, prompts shared by a group) take their
place.

`attend` runs CUDA's variable-length flash kernel for half precision, and otherwise one dense attention for
each run of equally long rows: exact in float32, on any device, and never with a mask over the whole line of
tokens.

What a model asks of attention beyond `AttentionRule` is refused by name.
"""

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

ATTENTION = "verl_packed"
# With "flash" in the name, vision towers make one call with row boundaries instead of one for each image.
VISION_ATTENTION = "verl_packed_flash"

MASKED_CHUNK = 1024  # queries at once under a soft cap, whose scores are held: chunk x keys
MAX_SCORES = 1 << 26  # scores held at once under a soft cap, over batch and heads
FLASH_HEAD_DIM = 256  # the largest head dimension of the flash kernels
VARLEN_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.12 and later

# Keywords that models hand to every attention function and that change nothing here.
HARMLESS = frozenset({
    "position_ids", "use_cache", "cache_position", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "max_seqlen", "return_dict", "output_hidden_states", "num_items_in_batch", "is_first_iteration",
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Where the rows of a packed batch begin, worked out once for all layers."""

    cu_lengths: Tensor  # (B + 1,) int32
    runs: tuple[tuple[int, int], ...]  # (rows, length of each): neighbours of equal length together
    max_length: int

    @classmethod
    def of(cls, cu_lengths: Tensor) -> "PackedLayout":
        """The layout for row boundaries, remembered on the tensor: a tower asks again in every layer."""
        known = getattr(cu_lengths, "packed_layout", None)
        if known is not None:
            return known
        bounds = cu_lengths.tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(bounds) if stop > start]
        runs: list[tuple[int, int]] = []
        for length in lengths:
            if runs and runs[-1][1] == length:
                runs[-1] = (runs[-1][0] + 1, length)
            else:
                runs.append((1, length))
        layout = cls(cu_lengths.to(torch.int32), tuple(runs), max(lengths, default=0))
        setattr(cu_lengths, "packed_layout", layout)  # noqa: B010 (tensors declare no such attribute)
        return layout


@dataclass(frozen=True)
class AttentionRule:
    """Which keys a query sees inside its row, and how scores become weights."""

    scale: float
    is_causal: bool = True
    window: int | None = None  # keys a causal query sees, itself included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


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
    packed_layout: PackedLayout | None = None,
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
        packed_layout: Row boundaries of a language model.
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
    return attend(query, key, value, layout, AttentionRule(scale, causal, sliding_window, softcap)), None


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


def attend(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, rule: AttentionRule) -> Tensor:
    """Attention of every token to the tokens of its own row.

    Args:
        query: (1, H, N, D).
        key: (1, Hkv, N, D).
        value: (1, Hkv, N, D).
        layout: Row boundaries.
        rule: Causality, window, scale and soft cap.

    Returns:
        (1, N, H, D).
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    fits = query.shape[-1] == value.shape[-1] <= FLASH_HEAD_DIM and query.shape[-1] % 8 == 0
    if query.is_cuda and half and fits and rule.softcap is None:
        return _attend_flash(query, key, value, layout, rule)
    return _attend_by_run(query, key, value, layout, rule)


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, rule: AttentionRule
) -> Tensor:
    """CUDA's variable-length kernel; (W - 1, 0) is a causal window of W keys, the query's own included."""
    window = (-1, 0) if rule.is_causal else (-1, -1)
    if rule.window is not None and rule.window < layout.max_length:
        window = (rule.window - 1, 0)
    flash: Any = varlen_attn  # its keywords differ between versions of torch
    if VARLEN_TAKES_GQA:
        options = {"enable_gqa": key.shape[1] != query.shape[1]}
    else:
        options = {}
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    query, key, value = (
        tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)
    )  # (N, H, D)
    bounds, longest = layout.cu_lengths, layout.max_length
    out = flash(
        query, key, value, bounds, bounds, longest, longest, scale=rule.scale, window_size=window, **options
    )  # (N, H, D)
    return out.unsqueeze(0)


def _attend_by_run(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, rule: AttentionRule
) -> Tensor:
    """One batch of dense attention for each run of equally long rows."""
    sizes = [rows * length for rows, length in layout.runs]
    parts = zip(layout.runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    outs = []
    for (rows, _), *tensors in parts:
        q, k, v = (
            tensor[0].unflatten(1, (rows, -1)).transpose(0, 1) for tensor in tensors
        )  # (rows, H, length, D)
        outs.append(_attend_dense(q, k, v, rule).transpose(1, 2).flatten(0, 1))  # (rows * length, H, D)
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)


def _attend_dense(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    """(rows, H, length, D) attention inside each row."""
    length = query.shape[2]
    is_windowed = rule.window is not None and rule.window < length
    if rule.softcap is None and not is_windowed:
        if query.is_cuda:  # its fused kernels want equal heads
            key, value = _repeat_heads(key, query), _repeat_heads(value, query)
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=rule.is_causal and length > 1, scale=rule.scale, enable_gqa=grouped
        )
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    rows = (
        len(query)
        if rule.softcap is None
        else max(1, MAX_SCORES // (query.shape[1] * min(length, MASKED_CHUNK) * length))
    )
    outs = [
        _attend_in_chunks(q, k, v, rule, rule.window if is_windowed else None)
        for q, k, v in zip(query.split(rows), key.split(rows), value.split(rows), strict=True)
    ]
    return torch.cat(outs)


def _attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, window: int | None
) -> Tensor:
    """Chunks of queries with the keys they can see: no mask is larger than chunk x (chunk + window)."""
    length = query.shape[2]
    chunk = MASKED_CHUNK if window is None else max(window, 64)
    outs = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        first = 0 if window is None else max(0, start - window + 1)
        last = stop if rule.is_causal else length
        mask = None
        if rule.is_causal:
            behind = torch.arange(start, stop, device=query.device)[:, None] - torch.arange(
                first, last, device=query.device
            )
            mask = behind >= 0 if window is None else (behind >= 0) & (behind < window)  # (chunk, keys) bool
        outs.append(
            _attend_masked(
                query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last], mask, rule
            )
        )
    return torch.cat(outs, 2)


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: AttentionRule
) -> Tensor:
    if rule.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rule.scale)
    scores = torch.matmul(query, key.transpose(2, 3)) * (rule.scale / rule.softcap)
    scores = torch.tanh(scores) * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype), value)


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1)


for _name in (ATTENTION, VISION_ATTENTION):
    AttentionInterface.register(_name, packed_attention)
