# SPDX-License-Identifier: Apache-2.0
"""Partial attention: each part covers some of the keys, and parts are merged by their log-sum-exp.

With s_ij the scaled score of query i and key j, a part over the keys K computes

    out_i = sum_{j in K} exp(s_ij - lse_i) v_j        lse_i = log sum_{j in K} exp(s_ij)

and `merge(...)` combines two parts over different keys. With the *merged* `out` and `lse`, `exp(s_ij -
lse_i)` is the final weight of key j, so the gradients of the parts are correct independently and are summed.
Ring attention does this across ranks (https://arxiv.org/abs/2310.01889), `attend_calls` within a process.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.distributed.device import has_kernels
from verl.models.attention.kernels import AttentionRule, RowRun, Rows, row_runs, run_backward, run_forward
from verl.models.attention.varlen_kernels import kernel_for


class Span(NamedTuple):
    """Adjacent rows of tokens."""

    tokens: slice
    cu_rows: Tensor  # (B + 1,) int32 row boundaries, counted from the first token
    lengths: tuple[int, ...]  # (B,), known without reading the boundaries back from a device

    @classmethod
    def of_all(
        cls, spans: Sequence[tuple[int, Sequence[int]]], device: torch.device | str | None
    ) -> list["Span"]:
        """Build spans of (first token, row lengths), whose boundaries reach the device in one copy."""
        bounds = [[0, *itertools.accumulate(lengths)] for _, lengths in spans]
        joined = torch.tensor(list(itertools.chain(*bounds)), dtype=torch.int32)
        joined = joined.to(device or "cpu", non_blocking=True)
        parts = joined.split([len(bound) for bound in bounds])
        return [
            cls(slice(start, start + bound[-1]), part, tuple(lengths))
            for (start, lengths), bound, part in zip(spans, bounds, parts, strict=True)
        ]


class AttentionCall(NamedTuple):
    """Rows of queries that attend to rows of keys: row b to row b, to all keys or some of them."""

    queries: Span
    keys: Span
    is_causal: bool  # the rows end together, and a query attends to its own key and those before it
    runs: tuple[RowRun, ...]
    sees_later: bool = False  # the same with those after it instead
    # (M,) int64: the tokens that are the keys of a causal call, whose rows may have some in common, and may
    # have more keys than queries; None: those of the span.
    taken: Tensor | None = None

    @classmethod
    def of(
        cls,
        queries: Span,
        keys: Span,
        is_causal: bool,
        *,
        sees_later: bool = False,
        taken: Tensor | None = None,
    ) -> "AttentionCall":
        runs = row_runs(queries.lengths, keys.lengths)
        is_aligned = sees_later or (is_causal and taken is None)
        if is_aligned and any(run.q_length != run.k_length for run in runs):
            raise ValueError("causal rows must have as many keys as queries")
        return cls(queries, keys, is_causal, runs, sees_later, taken)

    def rows(self, rule: AttentionRule) -> Rows:
        before, after = None, None
        if self.sees_later:
            before = 0
        elif self.is_causal:
            longest = max((run.k_length for run in self.runs), default=0)
            before = rule.window - 1 if rule.window is not None and rule.window < longest else None
            after = 0
        bounds = self.queries.cu_rows, self.keys.cu_rows
        # Kernels write the results of no more than these queries and keys of a row, also where they are zero.
        longest = max(self.queries.lengths, default=0), max(self.keys.lengths, default=0)
        return Rows(*bounds, self.runs, longest, rule.scale, before, after, rule.softcap)

    def take_keys(self, tensor: Tensor) -> Tensor:
        """Return the keys, or their values, among those of all tokens (N, Hkv, D)."""
        return tensor[self.keys.tokens] if self.taken is None else tensor.index_select(0, self.taken)

    def add_to_keys(self, totals: Tensor, grads: Tensor) -> None:
        """Add gradients of what `take_keys` returned, in place."""
        if self.taken is None:
            totals[self.keys.tokens] += grads
        else:
            totals.index_add_(0, self.taken, grads.to(totals.dtype))


def partial_forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Compute attention of rows of queries (Nq, H, D) to rows of keys and values (Nk, Hkv, D), any strides.

    If causal, query t of a row attends to its first t + 1 keys. Returns
    `out` (Nq, H, D) in q's dtype, and `lse` (H, Nq) in at least float32; 0 and -inf without keys.
    """
    kernel = kernel_for(q, v, rows.softcap) if rows.runs else None
    if kernel is not None:
        return kernel.forward(q, k, v, rows)
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), _empty_lse(q)
    for run in rows.runs:
        run_out, run_lse = run_forward(_queries(q, run), _keys(k, q, run), _keys(v, q, run), rows)
        run_out, run_lse = _tokens(run_out), run_lse.transpose(0, 1).flatten(1)  # (n, H, D), (H, n)
        if len(run_out) == len(q):
            return run_out, run_lse
        out[run.q_slice], lse[:, run.q_slice] = run_out, run_lse
    return out, lse


def partial_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this part's contribution to the gradients of q, k and v, given the *merged* `out` and `lse`."""
    kernel = kernel_for(q, v, rows.softcap) if rows.runs else None
    if kernel is not None:
        return kernel.backward(grad_out, q, k, v, out, lse, rows)
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for run in rows.runs:
        run_lse = lse[:, run.q_slice].unflatten(1, (run.rows, -1)).transpose(0, 1)  # (rows, H, Lq)
        queries, run_out = (_queries(tensor, run) for tensor in (q, out))
        tensors = queries, _keys(k, q, run), _keys(v, q, run), run_out, run_lse
        run_dq, run_dk, run_dv = run_backward(_queries(grad_out, run), *tensors, rows)
        dq[run.q_slice] = _tokens(run_dq)
        dk[run.k_slice], dv[run.k_slice] = (_sum_heads(_tokens(grad), k) for grad in (run_dk, run_dv))
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts over different keys, in at least float32; 0 and -inf mark queries without keys.

    lse' = log(exp(lse) + exp(new_lse))        out' = out + (new_out - out) exp(new_lse - lse')
    """
    share = torch.sigmoid(new_lse - lse).nan_to_num_(0.0)  # (H, Nq); without keys any share will do
    weight = share.transpose(0, 1).unsqueeze(-1)  # (Nq, H, 1)
    return torch.lerp(out.to(lse.dtype), new_out.to(lse.dtype), weight), torch.logaddexp(lse, new_lse)


def attend_calls(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    calls: Sequence[AttentionCall],
    rule: AttentionRule,
    sinks: Tensor | None = None,  # (H,) scores of a further key of every query, whose value is zero
) -> Tensor:
    """Compute attention (N, H, D) of each query to the keys of all calls, which are all different."""
    if has_kernels(q.device):
        q = q.contiguous()  # so is the result, which the kernels' backward would copy
    return _AttendCalls.apply(q, k, v, sinks, tuple(calls), rule)  # pyright: ignore[reportReturnType]


def add_attention(
    out: Tensor, lse: Tensor, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule
) -> None:
    """Merge the attention of a call into `out` and `lse`, in place."""
    at = call.queries.tokens
    part = partial_forward(q[at], call.take_keys(k), call.take_keys(v), call.rows(rule))
    out[at], lse[:, at] = merge(out[at], lse[:, at], *part)


def add_gradients(
    totals: Sequence[Tensor],  # gradients of q, k and v, changed in place
    call: AttentionCall,
    grad_out: Tensor,
    tensors: Sequence[Tensor],  # q, k, v, and the merged out and lse
    rule: AttentionRule,
) -> None:
    at = call.queries.tokens
    q, k, v, out, lse = tensors
    own = q[at], call.take_keys(k), call.take_keys(v), out[at], lse[:, at]
    dq, dk, dv = partial_backward(grad_out[at], *own, call.rows(rule))
    totals[0][at] += dq
    call.add_to_keys(totals[1], dk)
    call.add_to_keys(totals[2], dv)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Merge a key with the score `sinks` (H,) and the value zero into the attention of every query."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))  # (H, Nq)
    return out.to(lse.dtype) * (lse - total).exp().transpose(0, 1).unsqueeze(-1), total


def sink_gradients(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradients (H,) of sinks, given the merged `out` and `lse`."""
    inner = (grad_out.to(lse.dtype) * out).sum(-1).transpose(0, 1)  # (H, Nq)
    weights = (sinks.to(lse.dtype).unsqueeze(1) - lse).exp()
    return -(weights * inner).sum(1).to(sinks.dtype)


class _AttendCalls(torch.autograd.Function):
    """Saves q, k, v, the merged result and its log-sum-exp; scores are recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        calls: tuple[AttentionCall, ...],
        rule: AttentionRule,
    ) -> Tensor:
        assert calls, "attention takes at least one call"
        first = calls[0]
        if first.queries.tokens == slice(0, len(q)):  # usual: every token attends to its own sequence
            out, lse = partial_forward(q, first.take_keys(k), first.take_keys(v), first.rows(rule))
            others = calls[1:]
        else:
            lse = _empty_lse(q)
            out, others = lse.new_zeros(*q.shape[:2], v.shape[2]), calls
        out = out.to(lse.dtype) if others else out
        for call in others:
            add_attention(out, lse, call, q, k, v, rule)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.calls, ctx.rule = calls, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors  # under checkpointing they can be read only once
        q, k, v, out, lse = saved
        d_sinks = None if sinks is None else sink_gradients(grads[0], out, lse, sinks)
        if len(ctx.calls) == 1 and _covers(ctx.calls[0], q, k):
            own = partial_backward(grads[0], q, k, v, out, lse, ctx.calls[0].rows(ctx.rule))
            return *own, d_sinks, None, None
        totals = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        for call in ctx.calls:
            add_gradients(totals, call, grads[0], saved, ctx.rule)
        grads = tuple(total.to(x.dtype) for total, x in zip(totals, (q, k, v), strict=True))
        return *grads, d_sinks, None, None


def _covers(call: AttentionCall, q: Tensor, k: Tensor) -> bool:
    everything = slice(0, len(q)), slice(0, len(k))
    return call.taken is None and (call.queries.tokens, call.keys.tokens) == everything


def _empty_lse(q: Tensor) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full((q.shape[1], len(q)), float("-inf"), dtype=dtype, device=q.device)  # (H, Nq)


def _queries(tokens: Tensor, run: RowRun) -> Tensor:
    """Return (rows, H, Lq, D), a view."""
    return tokens[run.q_slice].unflatten(0, (run.rows, -1)).transpose(1, 2)


def _keys(tokens: Tensor, q: Tensor, run: RowRun) -> Tensor:
    """Return (rows, H, Lk, D), with key heads repeated for the heads of q."""
    rows = tokens[run.k_slice].unflatten(0, (run.rows, -1)).transpose(1, 2)
    repeats = q.shape[1] // tokens.shape[1]
    return rows if repeats == 1 else rows.repeat_interleave(repeats, 1)


def _tokens(rows: Tensor) -> Tensor:  # (rows, H, L, D) to (rows * L, H, D)
    return rows.transpose(1, 2).flatten(0, 1)


def _sum_heads(grad: Tensor, k: Tensor) -> Tensor:
    """Sum the gradients of the copies that `_keys` made: (n, H, D) to (n, Hkv, D)."""
    return grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)
