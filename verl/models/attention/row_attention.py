# SPDX-License-Identifier: Apache-2.0
"""Attention within each sequence of a packed batch, under every rule that models use.

Half precision on CUDA uses the variable-length flash kernel; everything else one dense attention for each run
of equally long sequences, exact in float32, without a mask over all packed tokens.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from verl.distributed.device import is_gpu
from verl.models.attention.kernels import MAX_SCORES, RowRun, has_flash

MASKED_CHUNK = 1024  # queries at once under a soft cap, whose scores are held: chunk x keys
VARLEN_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.12 and later


@dataclass(frozen=True)
class AttentionRule:
    """The keys that a query attends to within its sequence, and the transformation of scores to weights."""

    scale: float
    is_causal: bool = True
    window: int | None = None  # keys that a causal query attends to, including itself
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, runs: Sequence[RowRun], rule: AttentionRule
) -> Tensor:
    """Compute attention (1, N, H, D) of (1, H, N, D) queries to (1, Hkv, N, D) keys of their own sequence."""
    if has_flash(query, value) and rule.softcap is None:
        longest = max((run.q_length for run in runs), default=0)
        return _attend_flash(query, key, value, cu_seqlens, longest, rule)
    return _attend_by_run(query, key, value, runs, rule)


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, rule: AttentionRule
) -> Tensor:
    # (W - 1, 0) is a causal window of W keys, including the query's own.
    window = (-1, 0) if rule.is_causal else (-1, -1)
    if rule.window is not None and rule.window < longest:
        window = (rule.window - 1, 0)
    flash: Any = varlen_attn  # its keywords differ between versions of torch
    options: dict[str, Any] = {}
    if VARLEN_TAKES_GQA:
        options["enable_gqa"] = key.shape[1] != query.shape[1]
    else:
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    options |= {"scale": rule.scale, "window_size": window}
    return flash(q, k, v, bounds, bounds, longest, longest, **options).unsqueeze(0)


def _attend_by_run(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[RowRun], rule: AttentionRule
) -> Tensor:
    sizes = [run.rows * run.q_length for run in runs]
    parts = zip(runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    outs = []
    for run, *tensors in parts:
        # (rows, H, length, D) each
        q, k, v = (tensor[0].unflatten(1, (run.rows, -1)).transpose(0, 1) for tensor in tensors)
        outs.append(_attend_dense(q, k, v, rule).transpose(1, 2).flatten(0, 1))  # (rows * length, H, D)
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)


def _attend_dense(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    """Compute attention within each row of (rows, H, length, D) tensors."""
    length = query.shape[2]
    is_windowed = rule.window is not None and rule.window < length
    if rule.softcap is None and not is_windowed:
        if is_gpu(query.device):  # its fused kernels need equal heads
            key, value = _repeat_heads(key, query), _repeat_heads(value, query)
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=rule.is_causal and length > 1, scale=rule.scale, enable_gqa=grouped
        )
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    rows = len(query)
    if rule.softcap is not None:  # the scores are held in memory
        rows = max(1, MAX_SCORES // (query.shape[1] * min(length, MASKED_CHUNK) * length))
    outs = [
        _attend_in_chunks(q, k, v, rule, rule.window if is_windowed else None)
        for q, k, v in zip(query.split(rows), key.split(rows), value.split(rows), strict=True)
    ]
    return torch.cat(outs)


def _attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, window: int | None
) -> Tensor:
    """Attend in chunks of queries, so that no mask is larger than chunk x (chunk + window)."""
    length = query.shape[2]
    chunk = MASKED_CHUNK if window is None else max(window, 64)
    outs = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        first = 0 if window is None else max(0, start - window + 1)
        last = stop if rule.is_causal else length
        mask = None
        if rule.is_causal:
            queries, keys = (
                torch.arange(*span, device=query.device) for span in ((start, stop), (first, last))
            )
            behind = queries[:, None] - keys
            mask = behind >= 0 if window is None else (behind >= 0) & (behind < window)  # (chunk, keys) bool
        q, k, v = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        outs.append(_attend_masked(q, k, v, mask, rule))
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
