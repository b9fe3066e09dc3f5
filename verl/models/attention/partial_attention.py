# SPDX-License-Identifier: Apache-2.0
"""Attention in parts: each part sees some of the keys, and the log-sum-exp of the scores puts them together.

With s_ij the scaled score of query i and key j, a part over the keys K gives

    out_i = sum_{j in K} exp(s_ij - lse_i) v_j        lse_i = log sum_{j in K} exp(s_ij)

and two parts over different keys make `merge(...)`, the attention over both. Backward needs no order: with
the *merged* `out` and `lse`, `exp(s_ij - lse_i)` is the final weight of key j, so each part's gradients are
right by themselves and are summed. This is what ring attention does over ranks
(https://arxiv.org/abs/2310.01889), and `attend_calls` for parts inside one process.

The kernels are in `verl.models.attention.kernels`; all are exact in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.attention.kernels import (
    RowRun,
    Rows,
    flash_backward,
    flash_forward,
    has_flash,
    row_runs,
    run_backward,
    run_forward,
)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Rows of queries that see rows of keys: queries of row b see keys of row b, all or the earlier ones."""

    q_start: int  # the stretch of the line that holds the queries
    q_stop: int
    k_start: int  # the stretch that holds the keys
    k_stop: int
    cu_q: Tensor  # (B + 1,) int32 row boundaries, counted from q_start
    cu_k: Tensor  # (B + 1,) int32 row boundaries, counted from k_start
    is_causal: bool


def partial_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each row of queries to the same row of keys, with the log-sum-exp of its scores.

    Args:
        q: (Nq, H, D) queries of all rows, one row behind the other; any strides.
        k: (Nk, Hkv, D); Hkv divides H, and each key head serves H / Hkv neighbouring query heads.
        v: (Nk, Hkv, D).
        cu_q: (B + 1,) int32 boundaries of the rows of queries, from 0 to Nq, on the device of q.
        cu_k: (B + 1,) int32 boundaries of the rows of keys, from 0 to Nk.
        is_causal: Query t of a row sees its first t + 1 keys; the row has as many keys as queries.
        scale: Of the scores.

    Returns:
        `out` (Nq, H, D) in q's dtype, and `lse` (H, Nq) float32 (float64 for float64 queries). A query
        without keys gets 0 and -inf.
    """
    rows = _rows_of(cu_q, cu_k, is_causal, scale)
    if has_flash(q, v) and rows.runs:
        return flash_forward(q, k, v, rows)
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), _empty_lse(q)
    for run in rows.runs:
        run_out, run_lse = run_forward(_queries(q, run), _keys(k, q, run), _keys(v, q, run), rows)
        run_out, run_lse = _tokens(run_out), run_lse.transpose(0, 1).flatten(1)  # (n, H, D), (H, n)
        if len(run_out) == len(q):
            return run_out, run_lse
        out[run.q_slice], lse[:, run.q_slice] = run_out, run_lse
    return out, lse


def partial_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What this part adds to the gradients.

    Args:
        grad_out: (Nq, H, D) gradient of the merged attention.
        q: (Nq, H, D) as in `partial_forward`, and so are k, v and the boundaries.
        k: (Nk, Hkv, D).
        v: (Nk, Hkv, D).
        out: (Nq, H, D) *merged* over all parts, in q's dtype.
        lse: (H, Nq) *merged* over all parts.
        cu_q: (B + 1,) int32.
        cu_k: (B + 1,) int32.
        is_causal: As in `partial_forward`.
        scale: Of the scores.

    Returns:
        Gradients of q (Nq, H, D), k (Nk, Hkv, D) and v (Nk, Hkv, D), in their dtypes.
    """
    rows = _rows_of(cu_q, cu_k, is_causal, scale)
    if has_flash(q, v) and rows.runs:
        return flash_backward(grad_out, q, k, v, out, lse, rows)
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for run in rows.runs:
        run_lse = lse[:, run.q_slice].unflatten(1, (run.rows, -1)).transpose(0, 1)  # (rows, H, Lq)
        run_dq, run_dk, run_dv = run_backward(
            _queries(grad_out, run),
            _queries(q, run),
            _keys(k, q, run),
            _keys(v, q, run),
            _queries(out, run),
            run_lse,
            rows,
        )
        dq[run.q_slice] = _tokens(run_dq)
        dk[run.k_slice], dv[run.k_slice] = (_sum_heads(_tokens(grad), k) for grad in (run_dk, run_dv))
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both parts, in float32 (float64 for float64 parts).

        lse' = log(exp(lse) + exp(new_lse))        out' = out + (new_out - out) exp(new_lse - lse')

    Args:
        out: (Nq, H, D), 0 where `lse` is -inf.
        lse: (H, Nq); -inf: no keys.
        new_out: (Nq, H, D), 0 where `new_lse` is -inf.
        new_lse: (H, Nq).

    Returns:
        `out` (Nq, H, D) and `lse` (H, Nq); 0 and -inf for queries that have no keys in either part.
    """
    share = torch.sigmoid(new_lse - lse).nan_to_num_(0.0)  # (H, Nq); no keys: any share
    weight = share.transpose(0, 1).unsqueeze(-1)  # (Nq, H, 1)
    return torch.lerp(out.to(lse.dtype), new_out.to(lse.dtype), weight), torch.logaddexp(lse, new_lse)


def attend_calls(q: Tensor, k: Tensor, v: Tensor, calls: Sequence[AttentionCall], scale: float) -> Tensor:
    """Attention of each query to the keys that all calls together give it; no key may come twice.

    Args:
        q: (N, H, D).
        k: (Nk, Hkv, D).
        v: (Nk, Hkv, D).
        calls: Which queries see which keys.
        scale: Of the scores.

    Returns:
        (N, H, D) in q's dtype, 0 for queries without keys; differentiable once.
    """
    return _AttendCalls.apply(q, k, v, tuple(calls), scale)  # pyright: ignore[reportReturnType] (untyped)


class _AttendCalls(torch.autograd.Function):
    """Keeps q, k, v, the merged result and its log-sum-exp; scores are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: tuple[AttentionCall, ...], scale: float
    ) -> Tensor:
        out = lse = None
        for call in calls:
            at, keys = slice(call.q_start, call.q_stop), slice(call.k_start, call.k_stop)
            part = partial_forward(q[at], k[keys], v[keys], call.cu_q, call.cu_k, call.is_causal, scale)
            if out is None or lse is None:
                if len(part[0]) == len(q):  # the usual first call: of every token to its own row
                    out, lse = part
                    continue
                lse = _empty_lse(q)
                out = lse.new_zeros(*q.shape[:2], v.shape[2])
            out = out.to(lse.dtype)
            out[at], lse[:, at] = merge(out[at], lse[:, at], *part)
        assert out is not None and lse is not None, "attention takes at least one call"
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
        for call in ctx.calls:
            at, keys = slice(call.q_start, call.q_stop), slice(call.k_start, call.k_stop)
            bounds = call.cu_q, call.cu_k, call.is_causal, ctx.scale
            parts = partial_backward(grad_out[at], q[at], k[keys], v[keys], out[at], lse[:, at], *bounds)
            for total, part in zip((dq[at], dk[keys], dv[keys]), parts, strict=True):
                total += part
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _rows_of(cu_q: Tensor, cu_k: Tensor, is_causal: bool, scale: float) -> Rows:
    runs = row_runs(cu_q, cu_k)
    if is_causal and any(run.q_length != run.k_length for run in runs):
        raise ValueError("causal rows must have as many keys as queries")
    return Rows(cu_q, cu_k, runs, is_causal, scale)


def _empty_lse(q: Tensor) -> Tensor:
    """(H, Nq) of -inf: no keys so far."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full((q.shape[1], len(q)), float("-inf"), dtype=dtype, device=q.device)


def _queries(tokens: Tensor, run: RowRun) -> Tensor:
    """(rows, H, Lq, D), a view."""
    return tokens[run.q_slice].unflatten(0, (run.rows, -1)).transpose(1, 2)


def _keys(tokens: Tensor, q: Tensor, run: RowRun) -> Tensor:
    """(rows, H, Lk, D) with the heads of q."""
    rows = tokens[run.k_slice].unflatten(0, (run.rows, -1)).transpose(1, 2)
    repeats = q.shape[1] // tokens.shape[1]
    return rows if repeats == 1 else rows.repeat_interleave(repeats, 1)


def _tokens(rows: Tensor) -> Tensor:
    """(rows * L, H, D) from (rows, H, L, D)."""
    return rows.transpose(1, 2).flatten(0, 1)


def _sum_heads(grad: Tensor, k: Tensor) -> Tensor:
    """(n, Hkv, D) from (n, H, D): what `_keys` repeated."""
    return grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)
