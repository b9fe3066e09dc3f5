# SPDX-License-Identifier: Apache-2.0
"""Differentiable exchanges between the ranks that share a packed sequence.

DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): between layers a rank holds some tokens with all heads,
during attention all tokens of its ring rank with some heads. Every function is collective over its group, in
the forward and in the backward pass.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel


def tokens_to_heads(
    query: Tensor,  # (1, H, n, D)
    key: Tensor,  # (1, Hkv, n, D)
    value: Tensor,  # (1, Hkv, n, D)
    sp: SequenceParallel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange shards of tokens for shards of heads, in one all-to-all.

    Returns (1, H / u, n * u, D), and twice (1, lcm(Hkv, u) / u, n * u, D), with u = `ulysses_size`.
    """
    size = sp.ulysses_size
    if query.shape[1] % size:
        raise ValueError(
            f"`ulysses_size` ({size}) must divide the model's {query.shape[1]} attention heads: use"
            " `ring_size` instead"
        )
    repeats = math.lcm(key.shape[1], size) // key.shape[1]
    # Copies of a kv head are adjacent, so that query heads still find theirs; their gradients are summed.
    parts = [query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)]
    by_rank = [part[0].unflatten(0, (size, -1)) for part in parts]  # (u, heads / u, n, D)
    shares = [part.shape[1] for part in by_rank]
    joined = _exchange(torch.cat(by_rank, 1), sp)  # (u, all heads / u, n, D): by source rank
    query, key, value = (part.transpose(0, 1).flatten(1, 2)[None] for part in joined.split(shares, 1))
    return query, key, value


def heads_to_tokens(out: Tensor, sp: SequenceParallel) -> Tensor:
    """Undo `tokens_to_heads` for the attention output: (1, n * u, H / u, D) to (1, n, H, D)."""
    by_rank = out[0].unflatten(0, (sp.ulysses_size, -1))  # (u, n, H / u, D)
    return _exchange(by_rank, sp).transpose(0, 1).flatten(1, 2)[None]


def share_heads(parts: Sequence[Tensor], sp: SequenceParallel) -> list[Tensor]:
    """Exchange shards of tokens for shards of heads: (n, H, ...) to (n * u, H / u, ...) each.

    There is one all-to-all for each dtype. `heads_to_tokens` undoes it.
    """
    size = sp.ulysses_size
    if size == 1:
        return list(parts)
    if parts[0].shape[1] % size:
        raise ValueError(
            f"`ulysses_size` ({size}) must divide the {parts[0].shape[1]} heads of linear attention layers"
        )
    shared: list[Tensor] = list(parts)
    for dtype in sorted({part.dtype for part in parts}, key=str):  # in the same order on every rank
        numbers = [number for number, part in enumerate(parts) if part.dtype == dtype]
        flat = [parts[number].reshape(*parts[number].shape[:2], -1) for number in numbers]
        by_rank = torch.cat(flat, -1).unflatten(1, (size, -1)).transpose(0, 1)  # (u, n, H / u, channels)
        received = _exchange(by_rank, sp).flatten(0, 1).split([part.shape[-1] for part in flat], -1)
        for number, part in zip(numbers, received, strict=True):
            shared[number] = part.reshape(*part.shape[:2], *parts[number].shape[2:])
    return shared


def gather_rows(
    values: Tensor,  # (m, ...)
    counts: Sequence[int],  # m of each rank
    sp: SequenceParallel,
    # False if all ranks compute the same from the result: a rank keeps the gradient of its own rows. True if
    # each rank uses the rows for its own tokens, as with media features: the ranks' gradients are summed.
    sum_gradients: bool = False,
    chunks: int = 1,  # consecutive exchanges; more need smaller buffers
) -> Tensor:
    """Concatenate the rows of all ranks that share a packed sequence, by rank index."""
    assert len(values) == counts[sp.index], "this rank has counts[index] rows"
    if sp.group is None or not sum(counts):
        return values
    return _GatherRows.apply(values, tuple(counts), sp, sum_gradients, chunks)


def _exchange(tensor: Tensor, sp: SequenceParallel) -> Tensor:
    """Send part i of a (u, ...) tensor to ulysses rank i; the result is ordered by source."""
    return tensor if sp.ulysses_group is None else AllToAll.apply(tensor, sp.ulysses_group)


class AllToAll(torch.autograd.Function):
    """An all-to-all of rows, of even parts without `sent` and `received`; its backward pass is the opposite.

    Gradients are multiplied by `scale` on their way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: dist.ProcessGroup,
        sent: list[int] | None = None,  # rows to each rank
        received: list[int] | None = None,  # rows from each rank
        scale: float | None = None,
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received, ctx.scale = group, sent, received, scale
        arrived = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = AllToAll.apply(grad, ctx.group, ctx.received, ctx.sent)
        return back if ctx.scale is None else back.mul_(ctx.scale), None, None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        counts: tuple[int, ...],
        sp: SequenceParallel,
        sum_gradients: bool,
        chunks: int,
    ) -> Tensor:
        ctx.counts, ctx.sp, ctx.sum_gradients, ctx.chunks = counts, sp, sum_gradients, chunks
        joined = values.new_empty(sum(counts), *values.shape[1:])
        parts = joined.split(counts)
        for rows, length in _chunk_rows(counts, chunks):
            padded = _padded([values[rows]], length)
            received = padded.new_empty(sp.size * length, *padded.shape[1:])
            dist.all_gather_into_tensor(received, padded, group=sp.group)
            for part, theirs in zip(parts, received.split(length), strict=True):
                part[rows].copy_(theirs[: len(part[rows])])
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        counts, sp = ctx.counts, ctx.sp
        parts = grad.split(counts)
        if not ctx.sum_gradients:
            return parts[sp.index], None, None, None, None
        own = grad.new_empty(parts[sp.index].shape)
        for rows, length in _chunk_rows(counts, ctx.chunks):
            padded = _padded([part[rows] for part in parts], length)
            received = padded.new_empty(length, *padded.shape[1:])
            dist.reduce_scatter_tensor(received, padded, group=sp.group)
            own[rows].copy_(received[: len(own[rows])])
        return own, None, None, None, None


def _chunk_rows(counts: Sequence[int], chunks: int) -> Iterator[tuple[slice, int]]:
    most = max(counts)  # the same on every rank
    length = -(-most // chunks)
    for start in range(0, most, length):
        stop = min(start + length, most)
        yield slice(start, stop), stop - start


def _padded(parts: Sequence[Tensor], length: int) -> Tensor:
    """Pad each part to `length` rows and concatenate."""
    joined = parts[0].new_zeros(len(parts) * length, *parts[0].shape[1:])
    for part, rows in zip(parts, joined.split(length), strict=True):
        rows[: len(part)] = part
    return joined
