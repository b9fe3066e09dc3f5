# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a line each sequence-parallel rank holds.

A line is made of groups: a prompt and, one behind the other, the responses that share it. A packed row is a
group without responses. Prompts and responses are the segments of the line.

Along the ring every segment is cut into 2 x ring_size chunks whose lengths differ by at most one, and ring
rank i holds chunks i and 2 x ring_size - 1 - i: under a causal mask every rank then has the same work (as in
The Llama 3 Herd of Models, section 3.3.2, https://arxiv.org/abs/2407.21783). The chunks that are one token
longer take turns, so nothing is padded except the ends of the ranks' lines. A ring rank's tokens are cut into
ulysses_size contiguous pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel


class LineGroup(NamedTuple):
    """A stretch of a line: a prompt and the responses that share it."""

    prompt: int  # tokens; of the whole row when nothing is shared
    responses: tuple[int, ...] = ()  # tokens of each


class RingShard(NamedTuple):
    """The tokens of ring rank i: chunk i of every segment, then chunk 2 x ring_size - 1 - i of every segment.

    In each half prompts come before responses. A group's only response is a part of its prompt.
    """

    first: tuple[LineGroup, ...]  # lengths of the chunks
    second: tuple[LineGroup, ...]


class LocalRows(NamedTuple):
    """Some tokens of the line, each on the rank that holds it."""

    local: Tensor  # (m,) int64: places in this rank's tokens
    counts: tuple[int, ...]  # how many of them each rank of the line holds
    order: Tensor  # (M,) int64: where each stands once all ranks' rows are joined by index


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """How a line of N tokens is divided, known to every rank of the line alike.

    Example::

        plan = shard_plan([LineGroup(7), LineGroup(4, (2, 3))], sp)
        local_ids = input_ids[plan.local]  # (n_local,)
        rows = plan.rows(rows_before_responses)
        results = gather_rows(read(hidden[rows.local]), rows.counts, sp)[rows.order]  # (M,)
    """

    groups: tuple[LineGroup, ...]
    local: Tensor  # (n_local,) int64: places in the line of this rank's tokens; padding repeats place 0
    is_padding: Tensor  # (n_local,) bool: at the end; what is computed there is read by nobody
    places: Tensor  # (N,) int64: where each token stands once all ranks' tokens are joined by index
    pieces: tuple[RingShard, ...]  # of every ring rank; empty without a ring
    index: int  # of this rank in the line
    size: int  # ranks of the line

    def rows(self, rows: Tensor) -> LocalRows:
        """Divide some tokens among the ranks that hold them.

        Args:
            rows: (M,) int64 places in the line, in any order, repetitions allowed.
        """
        places = self.places[rows]
        owners = places.div(len(self.local), rounding_mode="floor")
        local = places[owners == self.index] - self.index * len(self.local)
        counts = torch.bincount(owners, minlength=self.size)
        return LocalRows(local, tuple(counts.tolist()), owners.argsort(stable=True).argsort())


def shard_plan(
    groups: Sequence[LineGroup], sp: SequenceParallel, device: torch.device | str = "cpu"
) -> ShardPlan:
    """Divide a line among the ranks of `sp`; no communication.

    Args:
        groups: What the line is made of.
        sp: This rank's place.
        device: Of the plan's tensors.

    Raises:
        ValueError: There are no tokens.
    """
    groups = tuple(groups)
    total = sum(group.prompt + sum(group.responses) for group in groups)
    if not total:
        raise ValueError("a line without tokens cannot be divided: join a row to it")
    if sp.ring_size == 1:
        lines, pieces = [torch.arange(total)], ()
    else:
        lines, pieces = _zigzag(groups, sp.ring_size)
    longest = max(len(line) for line in lines)
    n_local = -(-longest // sp.ulysses_size)
    joined = torch.full((sp.ring_size, n_local * sp.ulysses_size), -1)
    for row, line in zip(joined, lines, strict=True):
        row[: len(line)] = line
    joined = joined.flatten()  # (size * n_local,): all ranks' tokens by index
    filled = (joined >= 0).nonzero()[:, 0]
    places = torch.empty(total, dtype=torch.int64)
    places[joined[filled]] = filled
    local = joined[sp.index * n_local : (sp.index + 1) * n_local]
    return ShardPlan(
        groups,
        local.clamp(min=0).to(device),
        (local < 0).to(device),
        places.to(device),
        pieces,
        sp.index,
        sp.size,
    )


def _zigzag(groups: tuple[LineGroup, ...], ring_size: int) -> tuple[list[Tensor], tuple[RingShard, ...]]:
    """Each ring rank's places in the line, and the lengths of its chunks."""
    count = 2 * ring_size
    chunks = _chunks([_joined(group) for group in groups], count)
    lines, pieces = [], []
    for rank in range(ring_size):
        halves = chunks[rank], chunks[count - 1 - rank]
        bounds = []
        for half in halves:
            bounds += [group[0] for group in half]  # prompts
            bounds += [response for group in half for response in group[1:]]
        lines.append(torch.cat([torch.arange(start, stop) for start, stop in bounds]))
        pieces.append(RingShard(*(tuple(_lengths(group) for group in half) for half in halves)))
    return lines, tuple(pieces)


def _joined(group: LineGroup) -> LineGroup:
    """A prompt with its only response is one row."""
    responses = tuple(length for length in group.responses if length)
    return group if len(responses) > 1 else LineGroup(group.prompt + sum(responses))


def _chunks(groups: list[LineGroup], count: int) -> list[list[list[tuple[int, int]]]]:
    """For each chunk and each group: where in the line that chunk of the prompt and of each response is."""
    chunks: list[list[list[tuple[int, int]]]] = [[] for _ in range(count)]
    place = turn = 0
    for group in groups:
        for chunk in chunks:
            chunk.append([])
        for length in (group.prompt, *group.responses):
            share, extra = divmod(length, count)
            for index, chunk in enumerate(chunks):
                size = share + ((index - turn) % count < extra)
                chunk[-1].append((place, place + size))
                place += size
            turn += extra
    return chunks


def _lengths(segments: list[tuple[int, int]]) -> LineGroup:
    prompt, *responses = (stop - start for start, stop in segments)
    return LineGroup(prompt, tuple(responses))
