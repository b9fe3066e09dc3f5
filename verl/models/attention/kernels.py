# SPDX-License-Identifier: Apache-2.0
"""Attention of one run of equally long rows: torch's fused CPU attention, or plain matrix products.

The plain products follow every rule on any device, with any head dimension, and hold at most `MAX_SCORES`
scores. They recompute the scores in backward.

Sequences that attend to themselves alone, without a soft cap, go through `attend_runs` instead: torch's own
attention for each run, exact in float32, without a mask over all packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.distributed.device import has_kernels

MAX_SCORES = 1 << 26  # scores held at once by plain products, over rows and heads
# transformers' names of types of layers
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LAYER_TYPES = (FULL, SLIDING, CHUNKED)
HALF_TYPES = (torch.bfloat16, torch.float16)

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class AttentionRule:
    """The keys that a query attends to within its sequence, and the transformation of scores to weights."""

    scale: float
    is_causal: bool = True
    window: int | None = None  # keys that a causal query attends to, including itself
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    layer_type: str = FULL
    chunk: int | None = None  # a causal query attends to keys of its own chunk of so many, counted in the row


class RowRun(NamedTuple):
    """Adjacent rows with equal numbers of queries and equal numbers of keys, none of them empty."""

    q_start: int
    k_start: int
    rows: int
    q_length: int
    k_length: int

    @property
    def q_slice(self) -> slice:
        return slice(self.q_start, self.q_start + self.rows * self.q_length)

    @property
    def k_slice(self) -> slice:
        return slice(self.k_start, self.k_start + self.rows * self.k_length)


def row_runs(q_lengths: Sequence[int], k_lengths: Sequence[int]) -> tuple[RowRun, ...]:
    """Return the runs of rows that have queries and keys."""
    runs: list[RowRun] = []
    q_start = k_start = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        row = RowRun(q_start, k_start, 1, q_length, k_length)
        q_start, k_start = q_start + q_length, k_start + k_length
        if not q_length or not k_length:
            continue
        if runs and _continues(runs[-1], row):
            runs[-1] = runs[-1]._replace(rows=runs[-1].rows + 1)
        else:
            runs.append(row)
    return tuple(runs)


def _continues(run: RowRun, row: RowRun) -> bool:
    lengths_agree = (run.q_length, run.k_length) == (row.q_length, row.k_length)
    return lengths_agree and run.q_slice.stop == row.q_start and run.k_slice.stop == row.k_start


class Rows(NamedTuple):
    """The rows of one call, the keys that a query attends to, and the transformation of scores to weights.

    The last query of a row is at the last key. A query attends to up to `before` keys before its own and
    `after` keys behind it.
    """

    cu_q: Tensor  # (B + 1,) int32
    cu_k: Tensor  # (B + 1,) int32
    runs: tuple[RowRun, ...]
    longest: tuple[int, int]  # most queries and most keys of a row, also of rows that lack the other
    scale: float
    before: int | None = None  # None: all
    after: int | None = None  # None: all; 0 is causal
    softcap: float | None = None

    @property
    def sees_all(self) -> bool:
        return self.before is None and self.after is None


def run_forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` (rows, H, Lq) of queries (rows, H, Lq, D) and keys (rows, H, Lk, D)."""
    if _has_fused_cpu(q, k, v, rows):
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, rows.after == 0, scale=rows.scale
        )
    outs, lses = [], []
    for queries, keys in _blocks(q, k, rows):
        scores, _ = _scores(q, k, queries, keys, rows)
        lses.append(scores.logsumexp(-1))
        weights = scores.sub_(lses[-1].unsqueeze(-1)).exp_()
        outs.append(_product(weights, v[:, :, keys], q.dtype).to(q.dtype))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def run_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_fused_cpu(q, k, v, rows):
        # in half precision this kernel takes twice the time and rounds more
        tensors = (tensor.to(lse.dtype) for tensor in (grad_out, q, k, v, out))
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, lse, 0.0, rows.after == 0, scale=rows.scale
        )
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
    inner = (grad_out.to(lse.dtype) * out).sum(-1, keepdim=True)  # (rows, H, Lq, 1)
    dk, dv = (torch.zeros(tensor.shape, dtype=lse.dtype, device=q.device) for tensor in (k, v))
    dqs = []
    for queries, keys in _blocks(q, k, rows):
        scores, slope = _scores(q, k, queries, keys, rows)
        weights = scores.sub_(lse[:, :, queries, None]).exp_()
        grads = grad_out[:, :, queries]
        dv[:, :, keys] += _product(weights.transpose(2, 3), grads, q.dtype)
        # From here on `weights` holds the gradients of the scores.
        weights *= (
            _product(grads, v[:, :, keys].transpose(2, 3), q.dtype) - inner[:, :, queries]
        ) * rows.scale
        if slope is not None:
            weights *= slope
        dqs.append(_product(weights, k[:, :, keys], q.dtype))
        dk[:, :, keys] += _product(weights.transpose(2, 3), q[:, :, queries], q.dtype)
    return torch.cat(dqs, 2).to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _has_fused_cpu(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> bool:
    is_causal = rows.before is None and rows.after == 0 and q.shape[2] == k.shape[2]
    is_plain = (rows.sees_all or is_causal) and rows.softcap is None
    return is_plain and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _blocks(q: Tensor, k: Tensor, rows: Rows) -> list[tuple[slice, slice]]:
    """Divide the queries, and return with each part the keys that some of its queries attend to."""
    size = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    if rows.before is not None:
        size = min(size, max(rows.before + 1, 64))  # of a window a part attends to size + before keys
    blocks = []
    ahead = k.shape[2] - q.shape[2]  # keys before that of the first query
    for start in range(0, q.shape[2], size):
        stop = min(start + size, q.shape[2])
        first = 0 if rows.before is None else max(0, start + ahead - rows.before)
        last = k.shape[2] if rows.after is None else min(k.shape[2], stop + ahead + rows.after)
        blocks.append((slice(start, stop), slice(first, last)))
    return blocks


def _scores(q: Tensor, k: Tensor, queries: slice, keys: slice, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Return (rows, H, queries, keys) scores, at least float32, -inf where masked; and a soft cap's slope."""
    scores = _product(q[:, :, queries], k[:, :, keys].transpose(2, 3), q.dtype).mul_(rows.scale)
    slope = None
    if rows.softcap is not None:
        scores.div_(rows.softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(rows.softcap)
    if not rows.sees_all:
        positions = torch.arange(queries.start, queries.stop, device=q.device) + (k.shape[2] - q.shape[2])
        distance = torch.arange(keys.start, keys.stop, device=q.device) - positions[:, None]
        if rows.after is not None:
            scores.masked_fill_(distance > rows.after, float("-inf"))
        if rows.before is not None:
            scores.masked_fill_(distance < -rows.before, float("-inf"))
    return scores, slope


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply (rows, H, n, m) and (rows, H, m, l) tensors, of a model that computes in `dtype`.

    The result is at least float32. Tensor cores take half precision, as in the flash kernels, and add in
    float32; elsewhere both factors are float32.
    """
    if has_kernels(left.device) and dtype in HALF_TYPES:
        factors = (tensor.to(dtype).flatten(0, 1) for tensor in (left, right))
        return torch.bmm(*factors, out_dtype=torch.float32).unflatten(0, left.shape[:2])
    wide = torch.promote_types(dtype, torch.float32)
    return left.to(wide) @ right.to(wide)


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[RowRun], rule: AttentionRule
) -> Tensor:
    """Compute attention (1, N, H, D) of (1, H, N, D) queries to (1, Hkv, N, D) keys of their own sequence."""
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
