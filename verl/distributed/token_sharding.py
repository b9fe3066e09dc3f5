# SPDX-License-Identifier: Apache-2.0
"""Division of a packed sequence over the sequence-parallel ranks.

A packed sequence consists of groups: a prompt followed by the responses that share it. A sequence that shares
nothing is a prompt without responses. Prompts and responses are its segments.

Around the ring each segment is cut into 2 x ring_size chunks whose lengths differ by at most one, and ring
rank i holds chunks i and 2 x ring_size - 1 - i, which balances the work under a causal mask (The Llama 3 Herd
of Models, section 3.3.2, https://arxiv.org/abs/2407.21783). A ring rank's tokens are divided contiguously
over its ulysses ranks. All of it is arithmetic on CPU tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.ulysses import gather_rows


class SequenceGroup(NamedTuple):
    """Lengths of a prompt and of the responses that share it."""

    prompt: int  # tokens; of the whole sequence when nothing is shared
    responses: tuple[int, ...] = ()


class RingShard(NamedTuple):
    """Chunk lengths of ring rank i: chunk i and chunk 2 x ring_size - 1 - i of every segment."""

    # Among each, prompts come before responses. A group's only response is part of its prompt.
    first: tuple[SequenceGroup, ...]
    second: tuple[SequenceGroup, ...]


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """The division of a packed sequence of N tokens, the same on all ranks that share it.

    Example::

        plan = shard_plan([SequenceGroup(7), SequenceGroup(4, (2, 3))], sp)
        local_ids = input_ids[plan.local]  # (n_local,)
    """

    groups: tuple[SequenceGroup, ...]
    local: Tensor  # (n_local,) int64: positions of this rank's tokens; padding repeats position 0
    is_padding: Tensor  # (n_local,) bool: at the end; its results are ignored
    positions: Tensor  # (N,) int64: index of each token after all ranks' tokens are concatenated
    ring_shards: tuple[RingShard, ...]  # of every ring rank; empty without a ring


class SPRows(NamedTuple):
    """M selected tokens of a packed sequence, in any order, m of them on this rank.

    Example::

        rows = SPRows.of(positions, plan, sp)  # on CPU
        targets = rows.select(targets)
        rows, targets = to_device((rows, targets), device)
        log_probs = rows.gather(read(hidden[rows.local], targets))  # (M,), equal on all ranks
    """

    local: Tensor  # (m,) int64: positions among this rank's tokens
    owned: Tensor | None = None  # (m,) int64: this rank's among the M; None: this rank holds all of them
    order: Tensor | None = None  # (M,) int64: index of each after all ranks' results are concatenated
    counts: tuple[int, ...] = ()  # of each rank
    sp: SequenceParallel = SequenceParallel()

    @classmethod
    def of(cls, positions: Tensor, plan: ShardPlan | None, sp: SequenceParallel) -> "SPRows":
        """Divide tokens at `positions` (M,) int64 among the ranks that hold them."""
        if plan is None:
            return cls(positions, sp=sp)
        joined = plan.positions[positions]
        owners = joined.div(len(plan.local), rounding_mode="floor")
        owned = (owners == sp.index).nonzero()[:, 0]
        local = joined[owned] - sp.index * len(plan.local)
        counts = torch.bincount(owners, minlength=sp.size)
        return cls(local, owned, owners.argsort(stable=True).argsort(), tuple(counts.tolist()), sp)

    def select(self, values: Tensor) -> Tensor:
        """(M, ...) to (m, ...)."""
        return values if self.owned is None else values.index_select(0, self.owned)

    def gather(self, values: Tensor) -> Tensor:
        """Gather the results of all ranks, (m,) to (M,); collective over the sequence-parallel group.

        All ranks must compute the same from the result: its gradient reaches only this rank's tokens.
        """
        return values if self.order is None else gather_rows(values, self.counts, self.sp)[self.order]


def shard_plan(groups: Sequence[SequenceGroup], sp: SequenceParallel) -> ShardPlan:
    """Divide a packed sequence among the ranks of `sp`, without communication."""
    groups = tuple(groups)
    total = sum(group.prompt + sum(group.responses) for group in groups)
    if not total:
        raise ValueError("a packed sequence without tokens cannot be divided: add a sequence to it")
    if sp.ring_size == 1:
        by_ring_rank, ring_shards = [torch.arange(total)], ()
    else:
        by_ring_rank, ring_shards = _zigzag(groups, sp.ring_size)
    longest = max(map(len, by_ring_rank))
    n_local = -(-longest // sp.ulysses_size)
    joined = torch.full((sp.ring_size, n_local * sp.ulysses_size), -1)
    for row, positions in zip(joined, by_ring_rank, strict=True):
        row[: len(positions)] = positions
    joined = joined.flatten()  # (size * n_local,): all ranks' tokens by index
    filled = (joined >= 0).nonzero()[:, 0]
    positions = torch.empty(total, dtype=torch.int64)
    positions[joined[filled]] = filled
    local = joined[sp.index * n_local : (sp.index + 1) * n_local]
    return ShardPlan(groups, local.clamp(min=0), local < 0, positions, ring_shards)


def _zigzag(groups: tuple[SequenceGroup, ...], ring_size: int) -> tuple[list[Tensor], tuple[RingShard, ...]]:
    count = 2 * ring_size
    chunks = _chunks([_with_single_response(group) for group in groups], count)
    by_ring_rank, ring_shards = [], []
    for rank in range(ring_size):
        pair = chunks[rank], chunks[count - 1 - rank]
        bounds = []
        for chunk in pair:
            bounds += [group[0] for group in chunk]  # prompts
            bounds += [response for group in chunk for response in group[1:]]
        by_ring_rank.append(torch.cat([torch.arange(start, stop) for start, stop in bounds]))
        ring_shards.append(RingShard(*(tuple(_lengths(group) for group in chunk) for chunk in pair)))
    return by_ring_rank, tuple(ring_shards)


def _with_single_response(group: SequenceGroup) -> SequenceGroup:
    responses = tuple(length for length in group.responses if length)
    return group if len(responses) > 1 else SequenceGroup(group.prompt + sum(responses))


def _chunks(groups: list[SequenceGroup], count: int) -> list[list[list[tuple[int, int]]]]:
    chunks: list[list[list[tuple[int, int]]]] = [[] for _ in range(count)]  # (start, stop) of each segment
    start = turn = 0
    for group in groups:
        for chunk in chunks:
            chunk.append([])
        for length in (group.prompt, *group.responses):
            share, extra = divmod(length, count)
            for index, chunk in enumerate(chunks):
                size = share + ((index - turn) % count < extra)
                chunk[-1].append((start, start + size))
                start += size
            turn += extra  # chunks with an extra token rotate, so only the end of a rank's tokens is padded
    return chunks


def _lengths(segments: list[tuple[int, int]]) -> SequenceGroup:
    prompt, *responses = (stop - start for start, stop in segments)
    return SequenceGroup(prompt, tuple(responses))
