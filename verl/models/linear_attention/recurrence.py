# SPDX-License-Identifier: Apache-2.0
"""The order in which recurrent layers read packed tokens, as plain data that is made on CPU.

A segment is a run of adjacent tokens. It starts from nothing, or from the end of the segment that it follows:
the responses to a shared prompt all follow the prompt.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from verl.distributed.device import to_device
from verl.distributed.sequence_parallel import SequenceParallel

CHUNK = 64  # tokens that the delta rule of torch computes together; shorter rows are padded to it


class Segment(NamedTuple):
    """Adjacent tokens of a packed sequence, at least one."""

    start: int
    length: int
    follows: int | None = None  # the segment whose end it starts from, an earlier one

    @property
    def stop(self) -> int:
        return self.start + self.length


def group_segments(groups: Iterable[tuple[int, Sequence[int]]]) -> tuple[Segment, ...]:
    """Return the segments of groups (prompt length, response lengths), where rows may be empty."""
    segments: list[Segment] = []
    start = 0
    for prompt, responses in groups:
        parent = len(segments)
        for length in (prompt, *responses):
            if length:
                segments.append(Segment(start, length, parent if len(segments) > parent else None))
            start += length
    return tuple(segments)


class VarlenWave(NamedTuple):
    """Segments whose starting states are known at the same time: rows of a kernel that takes `cu_seqlens`."""

    tokens: Tensor | None  # (n,) int64: packed positions; None means all
    cu_seqlens: Tensor  # (rows + 1,) int64
    cu_seqlens_cpu: Tensor  # the same on the CPU
    parents: Tensor | None  # (rows,) int64: rows of the wave before, whose final states are their first ones


class PaddedWave(NamedTuple):
    """Segments whose starting states are known at the same time: rows of a kernel that takes padded rows."""

    batches: tuple[Tensor, ...]  # (rows, length) int64 each: packed positions, N for padding at the end
    parents: Tensor | None  # (rows of all batches,) int64


class VarlenPlan(NamedTuple):
    """Calls of a kernel that takes `cu_seqlens`."""

    waves: tuple[VarlenWave, ...]
    order: Tensor | None  # (N,) int64: index of each token among those of all waves; None: the same order


class PaddedPlan(NamedTuple):
    """Calls of a function that takes padded rows."""

    waves: tuple[PaddedWave, ...]
    order: Tensor  # (N,) int64: index of each token among all rows of all batches


class WholeRows(NamedTuple):
    """Rows from their first token to their last, each response behind a copy of its prompt."""

    batches: tuple[Tensor, ...]  # (rows, length) int64 each: packed positions, N for padding at the end
    order: Tensor  # (N,) int64: index of each token, of copies the first, among those of all batches


class Window(NamedTuple):
    """Rows of a causal convolution: each segment on this rank, behind the inputs before it."""

    # (M,) int64: indices into a zero, this rank's tokens and `borrowed` ones of all ranks, in that order.
    tokens: Tensor
    kept: Tensor  # (n,) int64: where this rank's tokens are among the M
    lent: Tensor  # int64: indices into this rank's tokens
    counts: tuple[int, ...]  # tokens that each rank lends; empty without sequence parallelism


@dataclass(frozen=True, eq=False)
class Recurrence:
    """The segments of a packed sequence, and what kernels need to follow them.

    With `sp` the packed sequence is divided contiguously over the ranks of `ulysses_group`.
    """

    segments: tuple[Segment, ...]
    device: torch.device | str = "cpu"  # of the tokens
    sp: SequenceParallel = field(default_factory=SequenceParallel)
    _windows: dict[int, Window] = field(default_factory=dict, init=False)  # by width

    @property
    def length(self) -> int:
        return max((segment.stop for segment in self.segments), default=0)

    @cached_property
    def varlen_plan(self) -> VarlenPlan:
        plan = _varlen_plan(self.segments)
        sent = to_device(plan, self.device)
        pairs = zip(sent.waves, plan.waves, strict=True)
        return sent._replace(
            waves=tuple(wave._replace(cu_seqlens_cpu=own.cu_seqlens_cpu) for wave, own in pairs)
        )

    @cached_property
    def padded_plan(self) -> PaddedPlan:
        return to_device(_padded_plan(self.segments, self.length), self.device)

    @cached_property
    def whole_rows(self) -> WholeRows:
        return to_device(_whole_rows(self.segments, self.length), self.device)

    def window(self, width: int) -> Window:
        """Plan a causal convolution over `width` tokens, on the device."""
        if width not in self._windows:
            self._windows[width] = to_device(_window(self, width), self.device)
        return self._windows[width]


def _waves(segments: Sequence[Segment]) -> list[list[int]]:
    """Return the segments that follow none, then the segments that follow these, and so on."""
    depths: list[int] = []
    for segment in segments:
        depths.append(0 if segment.follows is None else depths[segment.follows] + 1)
    return [[i for i, depth in enumerate(depths) if depth == wave] for wave in range(max(depths) + 1)]


def _parents(segments: Sequence[Segment], waves: list[list[int]], depth: int) -> Tensor | None:
    if depth == 0:
        return None
    rows = {segment: row for row, segment in enumerate(waves[depth - 1])}
    return torch.tensor([rows[parent] for i in waves[depth] if (parent := segments[i].follows) is not None])


def _varlen_plan(segments: Sequence[Segment]) -> VarlenPlan:
    waves = _waves(segments)
    tokens = [torch.cat([torch.arange(segments[i].start, segments[i].stop) for i in wave]) for wave in waves]
    is_single = len(waves) == 1
    planned = []
    for depth, wave in enumerate(waves):
        bounds = torch.tensor([0, *itertools.accumulate(segments[i].length for i in wave)])
        own = None if is_single else tokens[depth]
        planned.append(VarlenWave(own, bounds, bounds, _parents(segments, waves, depth)))
    return VarlenPlan(tuple(planned), None if is_single else torch.cat(tokens).argsort())


def _padded_plan(segments: Sequence[Segment], length: int) -> PaddedPlan:
    # Equal numbers of chunks: functions that pad rows to whole chunks compute no more than row by row.
    def chunks(i: int) -> int:
        return -(-segments[i].length // CHUNK)

    waves = [sorted(wave, key=chunks) for wave in _waves(segments)]
    planned = []
    for depth, wave in enumerate(waves):
        batches = []
        for _, rows in itertools.groupby(wave, chunks):
            tokens = [torch.arange(segments[i].start, segments[i].stop) for i in rows]
            batches.append(nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=length))
        planned.append(PaddedWave(tuple(batches), _parents(segments, waves, depth)))
    order = torch.cat([tokens.flatten() for wave in planned for tokens in wave.batches])
    return PaddedPlan(tuple(planned), order.argsort(stable=True)[:length])


def _whole_rows(segments: Sequence[Segment], length: int) -> WholeRows:
    tokens: list[Tensor] = []  # of each segment, behind those of the segments that it follows
    for segment in segments:
        before = [] if segment.follows is None else [tokens[segment.follows]]
        tokens.append(torch.cat([*before, torch.arange(segment.start, segment.stop)]))
    followed = {segment.follows for segment in segments}
    rows = [row for number, row in enumerate(tokens) if number not in followed]
    # Less than half of a batch is padding.
    by_size = itertools.groupby(sorted(rows, key=len), lambda row: len(row).bit_length())
    batches = tuple(
        nn.utils.rnn.pad_sequence(list(some), batch_first=True, padding_value=length) for _, some in by_size
    )
    joined = torch.cat([batch.flatten() for batch in batches])
    order = torch.full((length + 1,), len(joined))
    order.scatter_reduce_(0, joined, torch.arange(len(joined)), "amin")
    return WholeRows(batches, order[:length])


def _window(recurrence: Recurrence, width: int) -> Window:
    sp = recurrence.sp
    share = -(-recurrence.length // sp.ulysses_size)  # tokens of each rank; the last ones are padded
    pieces = [_pieces(recurrence.segments, rank * share, share, width) for rank in range(sp.ulysses_size)]
    borrowed = sorted({
        position
        for rank, each in enumerate(pieces)
        for piece in each
        for position in piece.before
        if position // share != rank
    })  # fmt: skip
    first = 1 + share
    place = {position: first + number for number, position in enumerate(borrowed)}
    own = sp.ulysses_index * share
    tokens: list[Tensor] = []
    kept: list[Tensor] = []
    end = 0
    for before, start, stop in pieces[sp.ulysses_index]:
        inputs = [0] * (width - 1 - len(before))
        inputs += [place.get(position, 1 + position - own) for position in before]
        tokens += [torch.tensor(inputs, dtype=torch.int64), torch.arange(start, stop) + (1 - own)]
        kept.append(torch.arange(stop - start) + end + len(inputs))
        end += len(inputs) + stop - start
    owners = [position // share for position in borrowed]
    lent = [position - own for position in borrowed if position // share == sp.ulysses_index]
    counts = tuple(owners.count(rank) for rank in range(sp.ulysses_size)) if borrowed else ()
    return Window(torch.cat(tokens), torch.cat(kept), torch.tensor(lent, dtype=torch.int64), counts)


class _Piece(NamedTuple):
    """A part of a segment on one rank."""

    before: list[int]  # positions of the inputs before it, at most the window's width less one
    start: int
    stop: int


def _pieces(segments: Sequence[Segment], first: int, share: int, width: int) -> list[_Piece]:
    """Return the parts of segments among a rank's tokens, and its padding."""
    pieces = []
    for number, segment in enumerate(segments):
        start, stop = max(segment.start, first), min(segment.stop, first + share)
        if start < stop:
            pieces.append(_Piece(_before(segments, number, start, width - 1), start, stop))
    end = max(first, segments[-1].stop)
    if end < first + share:  # padding
        pieces.append(_Piece([], end, first + share))
    return pieces


def _before(segments: Sequence[Segment], number: int, start: int, count: int) -> list[int]:
    """Return the `count` positions before `start`, which is in a segment, fewer at the start of a row."""
    segment = segments[number]
    own = list(range(max(segment.start, start - count), start))
    if len(own) == count or segment.follows is None:
        return own
    parent = segments[segment.follows]
    return [*_before(segments, segment.follows, parent.stop, count - len(own)), *own]
