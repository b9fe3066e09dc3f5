# SPDX-License-Identifier: Apache-2.0
"""Attention within each sequence of a packed batch, under every rule that models use.

The process's kernel takes all rows at once, where one takes such tensors. Otherwise it is one dense attention
for each run of equally long sequences, exact in float32, without a mask over all packed tokens. A soft cap
recomputes its scores in backward, so that no scores of a long sequence are kept.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.distributed.device import has_kernels
from verl.models.attention.kernels import AttentionRule, RowRun
from verl.models.attention.partial_attention import AttentionCall, attend_calls
from verl.models.attention.varlen_kernels import kernel_for


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: AttentionCall, rule: AttentionRule
) -> Tensor:
    """Compute attention (1, N, H, D) of (1, H, N, D) queries to (1, Hkv, N, D) keys of their own sequence."""
    if rule.softcap is None and kernel_for(query, value, rule.softcap) is None:
        return _attend_by_run(query, key, value, rows.runs, rule)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # (N, H, D) each
    return attend_calls(q, k, v, [rows], rule).unsqueeze(0)


def _attend_by_run(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[RowRun], rule: AttentionRule
) -> Tensor:
    sizes = [run.rows * run.q_length for run in runs]
    parts = zip(runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    outs = []
    for run, *tensors in parts:
        # (rows, H, length, D) each
        q, k, v = (tensor.squeeze(0).unflatten(1, (run.rows, -1)).transpose(0, 1) for tensor in tensors)
        outs.append(_attend_dense(q, k, v, rule).transpose(1, 2).flatten(0, 1))  # (rows * length, H, D)
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)


def _attend_dense(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    """Compute attention within each row of (rows, H, length, D) tensors."""
    length = query.shape[2]
    if has_kernels(query.device):  # its fused kernels need equal heads
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    if rule.window is not None and rule.window < length:
        return _attend_in_window(query, key, value, rule.scale, rule.window)
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=rule.is_causal and length > 1, scale=rule.scale, enable_gqa=grouped
    )


def _attend_in_window(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """Attend in chunks of queries, so that no mask is larger than chunk x (chunk + window)."""
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    length, chunk = query.shape[2], max(window, 64)
    outs = []
    for start in range(0, length, chunk):
        stop, first = min(start + chunk, length), max(0, start - window + 1)
        queries, keys = (torch.arange(*span, device=query.device) for span in ((start, stop), (first, stop)))
        behind = queries[:, None] - keys
        mask = (behind >= 0) & (behind < window)  # (chunk, keys) bool
        q, k, v = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    return torch.cat(outs, 2)


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1)
