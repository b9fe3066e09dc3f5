# SPDX-License-Identifier: Apache-2.0
"""Layouts of a line whose tokens are spread over the ranks of `SequenceParallel`.

- `UlyssesLayout`: exchanges tokens for heads, and lets another layout attend.
- `RingLayout`: each rank's queries see the keys of all ring ranks, which travel from rank to rank.

`sequence_layout` composes them, ulysses around the ring, over packed and over shared lines.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.distributed.ring import start_transfer
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import RingShard, ShardPlan
from verl.distributed.ulysses import heads_to_tokens, tokens_to_heads
from verl.models.attention.layouts import Layout, PackedLayout, SharedLayout
from verl.models.attention.partial_attention import (
    AttentionCall,
    merge,
    partial_backward,
    partial_forward,
    row_runs,
)
from verl.models.attention.row_attention import AttentionRule


def sequence_layout(plan: ShardPlan, sp: SequenceParallel) -> Layout:
    """How this rank's tokens of a line attend; without sequence parallelism, the plain layout.

    Args:
        plan: The line, divided over `sp`.
        sp: This rank's place.
    """
    if sp.ring_size > 1:
        layout = RingLayout.of(plan, sp)
        return layout if sp.ulysses_size == 1 else UlyssesLayout(sp, layout)
    device = plan.local.device
    if any(group.responses for group in plan.groups):
        layout = SharedLayout.of(plan.groups, device)
    else:
        lengths = [group.prompt for group in plan.groups]
        layout = PackedLayout.of(_bounds(lengths, device))
    return layout if sp.ulysses_size == 1 else UlyssesLayout(sp, layout, len(plan.positions))


@dataclass(frozen=True, eq=False)
class UlyssesLayout:
    """During attention a rank holds all tokens of its ring rank with a share of the heads."""

    sp: SequenceParallel
    inner: Layout
    length: int | None = None  # tokens that `inner` knows; behind them is padding. None: all

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Attention of this rank's tokens (1, heads, n_local, D) as `inner` has it, see `Layout`.

        Padding gets 0.

        Raises:
            ValueError: `ulysses_size` does not divide the query heads.
        """
        query, key, value = tokens_to_heads(query, key, value, self.sp)
        size = query.shape[2]
        length = size if self.length is None else self.length
        out = self.inner.attend(query[:, :, :length], key[:, :, :length], value[:, :, :length], rule)
        return heads_to_tokens(F.pad(out, (0, 0, 0, 0, 0, size - length)), self.sp)


@dataclass(frozen=True, eq=False)
class RingLayout:
    """Each ring rank holds two chunks of every segment; keys and values travel, and their gradients too."""

    sp: SequenceParallel
    calls: tuple[tuple[AttentionCall, ...], ...]  # what this rank's queries see of each ring rank's keys
    longest_row: int  # prompt and response

    @classmethod
    def of(cls, plan: ShardPlan, sp: SequenceParallel) -> "RingLayout":
        """The layout of a divided line."""
        halves = [_halves(piece, plan.local.device) for piece in plan.ring_shards]
        own = sp.ring_index
        calls = tuple(_calls(halves[own], halves[source], source - own) for source in range(sp.ring_size))
        return cls(sp, calls, max(group.prompt + max(group.responses, default=0) for group in plan.groups))

    def refuses(self, rule: AttentionRule) -> str | None:
        """Why this layout cannot follow a rule; None if it can."""
        if not rule.is_causal:
            return "attention to later tokens is not supported"
        if rule.softcap is not None:
            return "a soft cap of the scores is not supported"
        if rule.window is not None and rule.window < self.longest_row:
            return (
                f"a sliding window of {rule.window} tokens is not supported in sequences longer than it (the"
                f" longest has {self.longest_row})"
            )
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Attention of this rank's tokens (1, heads, n, D) to all ring ranks' keys, see `Layout`.

        Padding gets 0.

        Raises:
            NotImplementedError: The layout `refuses` the rule.
        """
        refusal = self.refuses(rule)
        if refusal is not None:
            raise NotImplementedError(f"around a ring, {refusal}: use `ulysses_size` instead of `ring_size`")
        lines = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (n, heads, D) each
        return _AttendRing.apply(*lines, self, rule.scale).unsqueeze(0)  # pyright: ignore (untyped)


class _Stretch(NamedTuple):
    """Rows behind each other."""

    start: int
    stop: int
    bounds: Tensor  # (rows + 1,) int32, counted from start


class _Half(NamedTuple):
    """The first or the second chunks of all segments."""

    segments: _Stretch  # a row for each segment
    prompts: _Stretch  # a row for each group
    responses: _Stretch  # a row for each group, its responses joined


def _halves(piece: RingShard, device: torch.device) -> tuple[_Half, _Half]:
    halves, start = [], 0
    for groups in piece:
        prompts = [group.prompt for group in groups]
        responses = [length for group in groups for length in group.responses]
        joined = [sum(group.responses) for group in groups]
        half = _Half(
            _stretch(start, prompts + responses, device),
            _stretch(start, prompts, device),
            _stretch(start + sum(prompts), joined, device),
        )
        halves.append(half)
        start = half.segments.stop
    first, second = halves
    return first, second


def _calls(own: tuple[_Half, _Half], other: tuple[_Half, _Half], ahead: int) -> tuple[AttentionCall, ...]:
    """What a rank's queries see of the keys of the rank that is `ahead` ranks further in the ring.

    With chunks 0 1 2 3 of a segment, rank 0 holds 0 and 3, rank 1 holds 1 and 2: chunk 1 sees 0, chunk 2 sees
    0, chunk 3 sees 1 and 2, and each sees itself.
    """
    (q_first, q_second), (k_first, k_second) = own, other
    seen = [(q_second.segments, k_first.segments, False)]
    if ahead <= 0:
        seen.append((q_first.segments, k_first.segments, ahead == 0))
    if ahead >= 0:
        seen.append((q_second.segments, k_second.segments, ahead == 0))
    seen += [(queries.responses, keys.prompts, False) for queries in own for keys in other]
    return tuple(
        AttentionCall(q.start, q.stop, k.start, k.stop, q.bounds, k.bounds, is_causal)
        for q, k, is_causal in seen
        if row_runs(q.bounds, k.bounds)
    )


def _stretch(start: int, lengths: list[int], device: torch.device) -> _Stretch:
    return _Stretch(start, start + sum(lengths), _bounds(lengths, device))


def _bounds(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def _travelling(
    layout: RingLayout, tensors: list[Tensor]
) -> Iterator[tuple[tuple[AttentionCall, ...], list[Tensor]]]:
    """The tensors of every ring rank, this one's first, and what this rank's queries see of them."""
    sp = layout.sp
    for step in range(sp.ring_size):
        under_way = start_transfer(tensors, sp) if step < sp.ring_size - 1 else None
        yield layout.calls[(sp.ring_index - step) % sp.ring_size], tensors
        if under_way is not None:
            tensors = under_way.wait()


class _AttendRing(torch.autograd.Function):
    """The next keys and values are under way while this rank computes with the ones it has."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: RingLayout, scale: float
    ) -> Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(*query.shape[:2], value.shape[2], dtype=dtype, device=query.device)
        lse = torch.full((query.shape[1], len(query)), float("-inf"), dtype=dtype, device=query.device)
        for calls, (k, v) in _travelling(layout, [key, value]):
            for call in calls:
                at, keys = slice(call.q_start, call.q_stop), slice(call.k_start, call.k_stop)
                bounds = call.cu_q, call.cu_k, call.is_causal, scale
                part = partial_forward(query[at], k[keys], v[keys], *bounds)
                out[at], lse[:, at] = merge(out[at], lse[:, at], *part)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        sp = ctx.layout.sp
        dq = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        behind = None  # the gradients of the keys at hand, from the ranks that had them before
        for calls, (k, v) in _travelling(ctx.layout, [key, value]):
            dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
            for call in calls:
                at, keys = slice(call.q_start, call.q_stop), slice(call.k_start, call.k_stop)
                bounds = call.cu_q, call.cu_k, call.is_causal, ctx.scale
                parts = partial_backward(
                    grads[0][at], query[at], k[keys], v[keys], out[at], lse[:, at], *bounds
                )
                for total, part in zip((dq[at], dk[keys], dv[keys]), parts, strict=True):
                    total += part
            if behind is not None:
                for total, part in zip((dk, dv), behind.wait(), strict=True):
                    total += part
            behind = start_transfer([dk, dv], sp)
        assert behind is not None, "a ring has ranks"
        dk, dv = behind.wait()
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None
