# SPDX-License-Identifier: Apache-2.0
"""Exchanges between the ranks of a line that autograd sees through.

`tokens_to_heads` and `heads_to_tokens` are DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): between
layers a rank holds some tokens with all heads, during attention all tokens of its ring rank with some heads.
`gather_rows` brings what the ranks computed for their own tokens to all of them.

Every function is collective over its group, in the forward and in the backward pass.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel


def tokens_to_heads(
    query: Tensor, key: Tensor, value: Tensor, sp: SequenceParallel
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of the ulysses ranks, in order, with this rank's share of the heads; one exchange for all.

    Where the kv heads do not divide by u = `ulysses_size` they are repeated until they do, each beside its
    copies, so that query heads still find theirs; the gradients of the copies are summed.

    Args:
        query: (1, H, n, D).
        key: (1, Hkv, n, D).
        value: (1, Hkv, n, D).
        sp: This rank's place.

    Returns:
        (1, H / u, n * u, D), and twice (1, lcm(Hkv, u) / u, n * u, D).

    Raises:
        ValueError: u does not divide the query heads.
    """
    size = sp.ulysses_size
    if query.shape[1] % size:
        raise ValueError(
            f"`ulysses_size` ({size}) must divide the model's {query.shape[1]} attention heads: use"
            " `ring_size` instead"
        )
    repeats = math.lcm(key.shape[1], size) // key.shape[1]
    parts = [query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)]
    by_rank = [part[0].unflatten(0, (size, -1)) for part in parts]  # (u, heads / u, n, D)
    shares = [part.shape[1] for part in by_rank]
    joined = _exchange(torch.cat(by_rank, 1), sp)  # (u, all heads / u, n, D): by source rank
    query, key, value = (part.transpose(0, 1).flatten(1, 2)[None] for part in joined.split(shares, 1))
    return query, key, value


def heads_to_tokens(out: Tensor, sp: SequenceParallel) -> Tensor:
    """The inverse for the result of attention: (1, n * u, H / u, D) to (1, n, H, D)."""
    by_rank = out[0].unflatten(0, (sp.ulysses_size, -1))  # (u, n, H / u, D)
    return _exchange(by_rank, sp).transpose(0, 1).flatten(1, 2)[None]


def gather_rows(
    values: Tensor,
    counts: Sequence[int],
    sp: SequenceParallel,
    sum_gradients: bool = False,
    pieces: int = 1,
) -> Tensor:
    """Join the rows that the ranks of a line hold, by their index.

    What crosses processes is padded to the rank with the most rows. In several pieces the buffers for it are
    that many times smaller, so that beside the result little more is held than the result.

    Args:
        values: (m, ...) of this rank.
        counts: m of each rank of the line.
        sp: This rank's place.
        sum_gradients: False if every rank computes the same from the result, as it does with results of the
            whole line: a rank then takes the gradient of its own rows. True if each rank uses the rows for
            its own tokens, as it does with features of media: the ranks' gradients are summed.
        pieces: Exchanges, one after the other, in which the rows are gathered, and their gradients summed;
            no more than the most rows of a rank.

    Returns:
        (sum of counts, ...), the same on every rank.
    """
    assert len(values) == counts[sp.index], "counts[index] rows are this rank's"
    if sp.group is None or not sum(counts):
        return values
    return _GatherRows.apply(values, tuple(counts), sp, sum_gradients, pieces)


def _exchange(tensor: Tensor, sp: SequenceParallel) -> Tensor:
    """(u, ...): part i goes to ulysses rank i, and comes back ordered by source."""
    return tensor if sp.ulysses_group is None else _Exchange.apply(tensor, sp.ulysses_group)


class _Exchange(torch.autograd.Function):
    """An all-to-all is its own inverse, and so its own backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous()
        out = torch.empty_like(tensor)
        dist.all_to_all_single(out, tensor, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        counts: tuple[int, ...],
        sp: SequenceParallel,
        sum_gradients: bool,
        pieces: int,
    ) -> Tensor:
        ctx.counts, ctx.sp, ctx.sum_gradients, ctx.pieces = counts, sp, sum_gradients, pieces
        joined = values.new_empty(sum(counts), *values.shape[1:])
        for rows, length in _stretches(counts, pieces):
            theirs = [part[rows] for part in joined.split(counts)]
            _gather_into(theirs, _padded([values[rows]], length), sp)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        counts, sp = ctx.counts, ctx.sp
        parts = grad.split(counts)
        if not ctx.sum_gradients:
            return parts[sp.index], None, None, None, None
        own = grad.new_empty(parts[sp.index].shape)
        for rows, length in _stretches(counts, ctx.pieces):
            _sum_into(own[rows], _padded([part[rows] for part in parts], length), sp)
        return own, None, None, None, None


def _stretches(counts: Sequence[int], pieces: int) -> Iterator[tuple[slice, int]]:
    """At most `pieces` stretches of each rank's rows, and the length of each; every rank finds the same."""
    most = max(counts)
    length = -(-most // pieces)
    for start in range(0, most, length):
        stop = min(start + length, most)
        yield slice(start, stop), stop - start


def _padded(parts: Sequence[Tensor], length: int) -> Tensor:
    """(parts * length, ...): the parts in order, each with empty rows behind it."""
    joined = parts[0].new_zeros(len(parts) * length, *parts[0].shape[1:])
    for part, place in zip(parts, joined.split(length), strict=True):
        place[: len(part)] = part
    return joined


def _gather_into(parts: Sequence[Tensor], padded: Tensor, sp: SequenceParallel) -> None:
    """Fill each rank's part from what it has padded here, (length, ...)."""
    received = padded.new_empty(len(parts) * len(padded), *padded.shape[1:])
    dist.all_gather_into_tensor(received, padded, group=sp.group)
    for part, theirs in zip(parts, received.split(len(padded)), strict=True):
        part.copy_(theirs[: len(part)])


def _sum_into(own: Tensor, padded: Tensor, sp: SequenceParallel) -> None:
    """Fill this rank's part with the sum of what the ranks have for it.

    Args:
        own: (m, ...).
        padded: (size * length, ...): what this rank has for each, in its order.
        sp: This rank's place.
    """
    received = padded.new_empty(len(padded) // sp.size, *padded.shape[1:])
    dist.reduce_scatter_tensor(received, padded, group=sp.group)
    own.copy_(received[: len(own)])
