# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.attention.layouts import PackedLayout
from verl.models.linear_attention.recurrence import Recurrence, Segment, group_segments


def row_segments(lengths):
    return group_segments((length, ()) for length in lengths)


GROUPS = [(5, (2, 3)), (1, (4,)), (3, (0, 2, 0)), (4, ()), (2, (1, 1, 70))]


def rows_of(segments) -> list[list[int]]:
    """The positions that each token's row has up to the end of its segment, for each segment."""
    rows = []
    for segment in segments:
        before = [] if segment.follows is None else rows[segment.follows]
        rows.append([*before, *range(segment.start, segment.stop)])
    return rows


def test_responses_follow_their_prompt_and_empty_ones_are_left_out():
    assert group_segments([(5, (2, 0, 3)), (4, ())]) == (
        Segment(0, 5),
        Segment(5, 2, 0),
        Segment(7, 3, 0),
        Segment(10, 4),
    )
    assert row_segments([3, 0, 2]) == (Segment(0, 3), Segment(3, 2))


def test_layouts_give_the_order_of_their_rows():
    packed = PackedLayout.of(torch.tensor([0, 3, 5], dtype=torch.int32))
    shared = PackedLayout.of_groups([(5, [2, 3]), (4, [2])])

    assert packed.recurrence.segments == row_segments([3, 2])
    assert shared.recurrence.segments == group_segments([(5, (2, 3)), (4, (2,))])
    assert packed.recurrence is packed.recurrence  # planned once for all layers


def cumulative(values: Tensor, segments) -> Tensor:
    """Sum of each token's row up to itself: a recurrence whose state is a sum."""
    total = torch.zeros_like(values)
    for row, segment in zip(rows_of(segments), segments, strict=True):
        sums = values[row].cumsum(0)
        total[segment.start : segment.stop] = sums[len(row) - segment.length :]
    return total


def run_padded(values: Tensor, recurrence: Recurrence) -> Tensor:
    plan = recurrence.padded_plan
    padded = torch.cat([values, values.new_zeros(1)])
    outs, states = [], []
    for wave in plan.waves:
        first = None if wave.parents is None else torch.cat(states)[wave.parents]
        starts = itertools.repeat(0.0) if first is None else first.split([len(b) for b in wave.batches])
        sums = [
            padded[tokens].cumsum(1) + (start[:, None] if isinstance(start, Tensor) else start)
            for tokens, start in zip(wave.batches, starts, strict=False)
        ]
        outs += [each.flatten() for each in sums]
        states = [each[:, -1] for each in sums]
    return torch.cat(outs)[plan.order]


def run_varlen(values: Tensor, recurrence: Recurrence) -> Tensor:
    plan = recurrence.varlen_plan
    outs, states = [], []
    for wave in plan.waves:
        own = values if wave.tokens is None else values[wave.tokens]
        bounds = wave.cu_seqlens.tolist()
        rows = [own[start:stop].cumsum(0) for start, stop in itertools.pairwise(bounds)]
        if wave.parents is not None:
            rows = [row + states[parent] for row, parent in zip(rows, wave.parents.tolist(), strict=True)]
        states = [row[-1] for row in rows]
        outs += rows
    joined = torch.cat(outs)
    return joined if plan.order is None else joined[plan.order]


@pytest.mark.parametrize(
    "segments",
    [row_segments([7, 1, 130, 64, 65, 2]), group_segments(GROUPS), row_segments([1])],
    ids=["rows", "groups", "one"],
)
@pytest.mark.parametrize("run", [run_padded, run_varlen])
def test_states_pass_from_a_segment_to_those_that_follow_it(segments, run):
    recurrence = Recurrence(segments)
    values = torch.randint(100, (recurrence.length,), generator=torch.Generator().manual_seed(0)).float()

    assert torch.equal(run(values, recurrence), cumulative(values, segments))


def test_padded_rows_have_equal_numbers_of_chunks():
    (wave,) = Recurrence(row_segments([7, 130, 1, 64, 65])).padded_plan.waves

    assert [tuple(tokens.shape) for tokens in wave.batches] == [(3, 64), (1, 65), (1, 130)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_window_has_the_inputs_before_each_token_on_any_number_of_ranks(ranks, width):
    segments = group_segments(GROUPS)
    length = max(segment.stop for segment in segments)
    share = -(-length // ranks)
    values = torch.arange(1, ranks * share + 1)  # more than 0
    parts = values.split(share)
    recurrences = [
        Recurrence(segments, sp=SequenceParallel(ulysses_size=ranks, index=rank)) for rank in range(ranks)
    ]
    windows = [recurrence.window(width) for recurrence in recurrences]
    borrowed = torch.cat([part[window.lent] for part, window in zip(parts, windows, strict=True)])

    found = []
    for part, window in zip(parts, windows, strict=True):
        assert not window.counts or list(window.counts) == [len(each.lent) for each in windows]
        inputs = torch.cat([torch.zeros(1, dtype=torch.int64), part, borrowed])[window.tokens]
        found.append(torch.stack([inputs[window.kept - back] for back in range(width)], 1))

    expected = torch.zeros(length, width, dtype=torch.int64)
    for row, segment in zip(rows_of(segments), segments, strict=True):
        for number in range(segment.length):
            end = len(row) - segment.length + number + 1
            before = torch.tensor(row[max(0, end - width) : end]).flip(0) + 1
            expected[segment.start + number, : len(before)] = before
    assert torch.equal(torch.cat(found)[:length], expected)
