# SPDX-License-Identifier: Apache-2.0
"""Attention inside each row of a line of tokens, under every rule that models ask for.

`attend_rows` runs CUDA's variable-length flash kernel for half precision, and otherwise one dense attention
for each run of equally long rows: exact in float32, on any device, and never with a mask over the whole line
of tokens.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

MASKED_CHUNK = 1024  # queries at once under a soft cap, whose scores are held: chunk x keys
MAX_SCORES = 1 << 26  # scores held at once under a soft cap, over batch and heads
FLASH_HEAD_DIM = 256  # the largest head dimension of the flash kernels
VARLEN_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.12 and later


@dataclass(frozen=True)
class AttentionRule:
    """Which keys a query sees inside its row, and how scores become weights."""

    scale: float
    is_causal: bool = True
    window: int | None = None  # keys a causal query sees, itself included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    runs: Sequence[tuple[int, int]],
    max_length: int,
    rule: AttentionRule,
) -> Tensor:
    """Attention of every token to the tokens of its own row.

    Args:
        query: (1, H, N, D).
        key: (1, Hkv, N, D); Hkv divides H.
        value: (1, Hkv, N, D).
        cu_seqlens: (B + 1,) int32 row boundaries.
        runs: The same rows as (rows, length of each), without empty ones.
        max_length: Of the rows.
        rule: Causality, window, scale and soft cap.

    Returns:
        (1, N, H, D).
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    fits = query.shape[-1] == value.shape[-1] <= FLASH_HEAD_DIM and query.shape[-1] % 8 == 0
    if query.is_cuda and half and fits and rule.softcap is None:
        return _attend_flash(query, key, value, cu_seqlens, max_length, rule)
    return _attend_by_run(query, key, value, runs, rule)


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, rule: AttentionRule
) -> Tensor:
    """CUDA's variable-length kernel; (W - 1, 0) is a causal window of W keys, the query's own included."""
    window = (-1, 0) if rule.is_causal else (-1, -1)
    if rule.window is not None and rule.window < longest:
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
    out = flash(
        query, key, value, bounds, bounds, longest, longest, scale=rule.scale, window_size=window, **options
    )  # (N, H, D)
    return out.unsqueeze(0)


def _attend_by_run(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[tuple[int, int]], rule: AttentionRule
) -> Tensor:
    """One batch of dense attention for each run of equally long rows."""
    sizes = [rows * length for rows, length in runs]
    parts = zip(runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
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
