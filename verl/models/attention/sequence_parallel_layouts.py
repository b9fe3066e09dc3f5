# SPDX-License-Identifier: Apache-2.0
"""Layouts of packed sequences that are sharded over the ranks of `SequenceParallel`.

`UlyssesLayout` exchanges tokens for heads around another layout. In `RingLayout` keys and values travel from
rank to rank. `sequence_layout` composes them, with ulysses outside of the ring.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import RingShard, ShardPlan
from verl.distributed.ulysses import heads_to_tokens, tokens_to_heads
from verl.models.attention.kernels import AttentionRule
from verl.models.attention.layouts import Blocks, Layout, PackedLayout, cached_on
from verl.models.attention.partial_attention import (
    AttentionCall,
    Span,
    add_attention,
    add_gradients,
    add_sinks,
    sink_gradients,
)
from verl.models.linear_attention.recurrence import Recurrence


def sequence_layout(
    plan: ShardPlan,
    sp: SequenceParallel,
    device: torch.device | str | None = None,
    blocks: Blocks | None = None,  # of the whole packed sequence
) -> Layout:
    """Return the layout of this rank's tokens, which are on `device`, by default where the plan is.

    Without sequence parallelism it is the plain layout.
    """
    device = plan.local.device if device is None else device
    if sp.ring_size > 1:
        if blocks is not None and blocks.bounds and blocks.layer_types:
            raise NotImplementedError(
                "in a ring, tokens of an image cannot attend to each other in both directions, as in this"
                " model: use `ulysses_size` instead of `ring_size`"
            )
        layout = RingLayout.of(plan, sp, device)
        return layout if sp.ulysses_size == 1 else UlyssesLayout(sp, layout)
    layout = PackedLayout.of_groups(plan.groups, device, blocks)
    return layout if sp.ulysses_size == 1 else UlyssesLayout(sp, layout, len(plan.positions))


@dataclass(frozen=True, eq=False)
class UlyssesLayout:
    """Attention over all tokens of a ring rank with a share of the heads."""

    sp: SequenceParallel
    inner: Layout
    length: int | None = None  # tokens of `inner`, followed by padding; None means all

    @property
    def recurrence(self) -> Recurrence:
        return cached_on(self, "_recurrence", lambda: replace(self.inner.recurrence, sp=self.sp))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None = None
    ) -> Tensor:
        query, key, value = tokens_to_heads(query, key, value, self.sp)
        size = query.shape[2]
        length = size if self.length is None else self.length
        if sinks is not None:
            sinks = sinks.chunk(self.sp.ulysses_size)[self.sp.ulysses_index]
        out = self.inner.attend(query[:, :, :length], key[:, :, :length], value[:, :, :length], rule, sinks)
        return heads_to_tokens(F.pad(out, (0, 0, 0, 0, 0, size - length)), self.sp)  # padding gets 0


@dataclass(frozen=True, eq=False)
class RingLayout:
    """Ring attention: a rank holds two chunks of every segment; keys, values and their gradients travel."""

    sp: SequenceParallel
    calls: tuple[tuple[AttentionCall, ...], ...]  # of this rank's queries to the keys of each ring rank
    longest_row: int  # prompt and response

    @classmethod
    def of(
        cls, plan: ShardPlan, sp: SequenceParallel, device: torch.device | str | None = None
    ) -> "RingLayout":
        spans = _chunk_spans(plan.ring_shards, plan.local.device if device is None else device)
        own = sp.ring_index
        calls = tuple(_calls(spans[own], spans[source], source - own) for source in range(sp.ring_size))
        return cls(sp, calls, max(group.prompt + max(group.responses, default=0) for group in plan.groups))

    @property
    def recurrence(self) -> Recurrence:
        raise NotImplementedError(
            "in a ring, a layer with a state is not supported, because each rank would wait for the states of"
            " the tokens before its own: use `ulysses_size` instead of `ring_size`"
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None = None
    ) -> Tensor:
        refusal = ring_obstacle(rule, self.longest_row)
        if refusal is not None:
            raise NotImplementedError(f"in a ring, {refusal}: use `ulysses_size` instead of `ring_size`")
        tokens = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # (n, heads, D) each
        return _AttendRing.apply(*tokens, sinks, self, rule).unsqueeze(0)  # pyright: ignore (untyped)


def ring_obstacle(rule: AttentionRule, longest_row: int) -> str | None:
    """Return why a ring cannot follow a rule in sequences of up to `longest_row` tokens, or None."""
    if not rule.is_causal:
        return "attention to later tokens is not supported"
    for size, name in ((rule.window, "a sliding window"), (rule.chunk, "attention in chunks")):
        if size is not None and size < longest_row:
            return (
                f"{name} of {size} tokens is not supported for longer sequences (the longest has"
                f" {longest_row})"
            )
    return None


class _ChunkSpans(NamedTuple):
    """The first or the second chunks of all segments."""

    segments: Span  # a row for each segment
    prompts: Span  # a row for each group
    responses: Span  # a row for each group: all of its responses


def _chunk_spans(
    shards: Sequence[RingShard], device: torch.device | str
) -> list[tuple[_ChunkSpans, _ChunkSpans]]:
    rows: list[tuple[int, Sequence[int]]] = []  # three spans for each of the two chunks of a shard
    for shard in shards:
        start = 0
        for groups in shard:
            prompts = [group.prompt for group in groups]
            responses = [length for group in groups for length in group.responses]
            joined = [sum(group.responses) for group in groups]
            rows += [(start, prompts + responses), (start, prompts), (start + sum(prompts), joined)]
            start += sum(prompts) + sum(responses)
    spans = iter(Span.of_all(rows, device))
    chunks = [_ChunkSpans(*three) for three in zip(spans, spans, spans, strict=True)]
    return list(zip(chunks[::2], chunks[1::2], strict=True))


def _calls(
    own: tuple[_ChunkSpans, _ChunkSpans], other: tuple[_ChunkSpans, _ChunkSpans], ahead: int
) -> tuple[AttentionCall, ...]:
    """Return the calls of a rank's queries to the keys of the rank `ahead` ranks further in the ring."""
    # With chunks 0 1 2 3 of a segment, rank 0 holds 0 and 3, rank 1 holds 1 and 2: chunk 1 attends to 0,
    # chunk 2 to 0 and 1, chunk 3 to 0, 1 and 2, and each to itself.
    (q_first, q_second), (k_first, k_second) = own, other
    attends = [(q_second.segments, k_first.segments, False)]
    if ahead <= 0:
        attends.append((q_first.segments, k_first.segments, ahead == 0))
    if ahead >= 0:
        attends.append((q_second.segments, k_second.segments, ahead == 0))
    attends += [(queries.responses, keys.prompts, False) for queries in own for keys in other]
    calls = (AttentionCall.of(*attend) for attend in attends)
    return tuple(call for call in calls if call.runs)


def _ring_steps(
    layout: RingLayout, tensors: list[Tensor]
) -> Iterator[tuple[tuple[AttentionCall, ...], list[Tensor]]]:
    """Yield this rank's calls and the tensors of every ring rank, starting with its own."""
    sp = layout.sp
    for step in range(sp.ring_size):
        # The next tensors arrive while this rank computes with the current ones.
        wait = start_transfer(tensors, sp) if step < sp.ring_size - 1 else None
        yield layout.calls[(sp.ring_index - step) % sp.ring_size], tensors
        if wait is not None:
            tensors = wait()


class _AttendRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layout: RingLayout,
        rule: AttentionRule,
    ) -> Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(*query.shape[:2], value.shape[2], dtype=dtype, device=query.device)
        lse = torch.full((query.shape[1], len(query)), float("-inf"), dtype=dtype, device=query.device)
        for calls, (k, v) in _ring_steps(layout, [key, value]):
            for call in calls:
                add_attention(out, lse, call, query, k, v, rule)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.layout, ctx.rule = layout, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks = ctx.saved_tensors
        sp = ctx.layout.sp
        dq = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        wait = None  # for the gradients of the current keys, from the ranks that had them before
        for calls, (k, v) in _ring_steps(ctx.layout, [key, value]):
            dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
            for call in calls:
                add_gradients((dq, dk, dv), call, grads[0], (query, k, v, out, lse), ctx.rule)
            if wait is not None:
                for total, part in zip((dk, dv), wait(), strict=True):
                    total += part
            wait = start_transfer([dk, dv], sp)
        assert wait is not None, "a ring has ranks"
        dk, dv = wait()
        d_sinks = None if sinks is None else sink_gradients(grads[0], out, lse, sinks)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), d_sinks, None, None


def start_transfer(tensors: Sequence[Tensor], sp: SequenceParallel) -> Callable[[], list[Tensor]]:
    """Start sending tensors to the next ring rank and receiving equal shapes from the previous one.

    The tensors must not be empty, and must not change until the end. All ring ranks send equal shapes.

    Returns:
        A function that waits for the end and returns the tensors of the previous ring rank.
    """
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    ahead, behind = (sp.ring_index + 1) % sp.ring_size, (sp.ring_index - 1) % sp.ring_size
    operations = []
    for out, into in zip(sent, received, strict=True):
        operations.append(dist.P2POp(dist.isend, out, group=sp.ring_group, group_peer=ahead))
        operations.append(dist.P2POp(dist.irecv, into, group=sp.ring_group, group_peer=behind))
    works = dist.batch_isend_irecv(operations)

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        sent.clear()  # which must outlive the transfer
        return received

    return wait
