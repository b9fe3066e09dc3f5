# SPDX-License-Identifier: Apache-2.0
import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from tests.helpers.distributed import run_distributed
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import LineGroup, shard_plan
from verl.distributed.ulysses import gather_rows, heads_to_tokens, tokens_to_heads

M_MMAP_THRESHOLD = -3  # of malloc.h
SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (2, 3)]
LINES = {
    "one token": [LineGroup(1)],
    "packed": [LineGroup(11), LineGroup(1), LineGroup(0), LineGroup(30), LineGroup(4)],
    "shared": [LineGroup(9, (3, 1, 5)), LineGroup(2, (4,)), LineGroup(13, (0, 2, 7))],
}


def ranks_of(ulysses, ring):
    return [SequenceParallel(ulysses, ring, index=index) for index in range(ulysses * ring)]


def owner_by_hand(groups, ring):
    """Which ring rank holds each token of segments that are long enough for no chunk to be empty."""
    owners = []
    for group in groups:
        for length in (group.prompt, *group.responses):
            chunk = length // (2 * ring)
            owners += [min(place // chunk, 2 * ring - 1 - place // chunk) for place in range(length)]
    return owners


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("line", LINES)
def test_every_token_of_a_line_is_on_one_rank(line, sizes):
    plans = [shard_plan(LINES[line], sp) for sp in ranks_of(*sizes)]

    joined = torch.cat([plan.local for plan in plans])
    real = ~torch.cat([plan.is_padding for plan in plans])
    total = sum(group.prompt + sum(group.responses) for group in LINES[line])
    assert sorted(joined[real].tolist()) == list(range(total))
    for plan in plans:
        assert joined[plan.places].tolist() == list(range(total))
        assert len(plan.local) == len(plans[0].local)


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_hold_equally_many_tokens_up_to_rounding_whatever_the_lengths(sizes):
    groups = [
        LineGroup(1),
        LineGroup(3),
        LineGroup(1),
        LineGroup(1),
        LineGroup(2),
        LineGroup(5),
        LineGroup(1),
    ]
    plan = shard_plan(groups * 20, ranks_of(*sizes)[0])

    size = sizes[0] * sizes[1]
    assert len(plan.local) <= -(-14 * 20 // size) + 1


def test_ring_ranks_hold_chunks_from_both_ends_of_every_segment():
    groups = [LineGroup(8), LineGroup(16, (8, 8))]  # four chunks each

    plans = [shard_plan(groups, sp) for sp in ranks_of(1, 2)]

    owners = torch.empty(40, dtype=torch.int64)
    for rank, plan in enumerate(plans):
        assert not plan.is_padding.any()
        owners[plan.local] = rank
    assert owners.tolist() == owner_by_hand(groups, 2)
    # First chunks of all segments, prompts before responses: 0 1 | 8..11 | 24 25 | 32 33, then last chunks.
    first = [0, 1, 8, 9, 10, 11, 24, 25, 32, 33]
    assert plans[0].local.tolist() == [*first, 6, 7, 20, 21, 22, 23, 30, 31, 38, 39]


def test_ulysses_ranks_hold_neighbouring_pieces_and_padding_stands_at_the_end():
    plans = [shard_plan([LineGroup(3), LineGroup(2)], sp) for sp in ranks_of(2, 1)]

    assert [plan.local.tolist() for plan in plans] == [[0, 1, 2], [3, 4, 0]]
    assert [plan.is_padding.tolist() for plan in plans] == [[False] * 3, [False, False, True]]


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_are_found_on_their_ranks_and_come_back_in_order(sizes):
    rows = torch.tensor([40, 3, 3, 0, 17, 25, 39, 1])
    values = torch.arange(100, 146)  # what each token of the line has

    plans = [shard_plan(LINES["packed"], sp) for sp in ranks_of(*sizes)]

    found = [values[plan.local][plan.rows(rows).local] for plan in plans]
    for plan in plans:
        assert plan.rows(rows).counts == tuple(len(part) for part in found)
        assert torch.cat(found)[plan.rows(rows).order].tolist() == values[rows].tolist()


def test_an_empty_line_is_refused():
    with pytest.raises(ValueError, match="without tokens"):
        shard_plan([LineGroup(0)], SequenceParallel.none())


def describe_groups(rank, world_size):
    import torch.distributed as dist

    sp = SequenceParallel.build(range(world_size), 2, 1)
    both = SequenceParallel.build(range(world_size), 2, 2)
    ranks = dist.get_process_group_ranks
    with pytest.raises(ValueError, match="4 ranks cannot be divided by `ulysses_size` \\(3\\)"):
        SequenceParallel.build(range(world_size), 3, 1)
    return [
        (sp.index, sp.dp_index, sp.ring_group, ranks(sp.group), ranks(sp.ulysses_group), ranks(sp.dp_group)),
        (both.index, both.dp_size, both.dp_group, ranks(both.ulysses_group), ranks(both.ring_group)),
        check_exchange(sp),
        check_exchange(both),
        check_gather(both),
    ]


def check_exchange(sp):
    """Differences of the exchange and its gradients from slices of the whole, on this rank."""
    generator = torch.Generator().manual_seed(sp.dp_index * 10 + sp.ring_index)
    differences = []
    for heads, kv_heads in ((4, 4), (4, 2), (4, 1), (6, 3)):
        whole = [torch.randn(1, count, 6, 2, generator=generator) for count in (heads, kv_heads, kv_heads)]
        weights = [torch.randn(1, heads, 6, 2, generator=generator) for _ in range(4)]
        at = slice(sp.ulysses_index * 3, sp.ulysses_index * 3 + 3)
        share = slice(sp.ulysses_index * heads // 2, (sp.ulysses_index + 1) * heads // 2)
        local = [tensor[:, :, at].clone().requires_grad_() for tensor in whole]
        exchanged = tokens_to_heads(*local, sp)
        back = heads_to_tokens(exchanged[0].transpose(1, 2), sp)
        full = [tensor.clone().requires_grad_() for tensor in whole]
        wide = [tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in full]
        ours = [part.repeat_interleave(heads // 2 // part.shape[1], 1) for part in exchanged]
        loss = sum((part * weight[:, share]).sum() for part, weight in zip(ours, weights, strict=False))
        (loss + (back * weights[3][:, :, at].transpose(1, 2)).sum()).backward()
        loss = sum((part * weight).sum() for part, weight in zip(wide, weights, strict=False))
        (loss + (wide[0] * weights[3]).sum()).backward()
        differences += [(a - b[:, share]).abs().max().item() for a, b in zip(ours, wide, strict=True)]
        differences.append((back.transpose(1, 2) - whole[0][:, :, at]).abs().max().item())
        differences += [
            (a.grad - b.grad[:, :, at]).abs().max().item() for a, b in zip(local, full, strict=True)
        ]
    return max(differences)


def check_gather(sp):
    counts = (2, 0, 3, 1)
    rows = torch.arange(12.0).view(6, 2)
    bounds = [0, *itertools.accumulate(counts)]
    at = slice(bounds[sp.index], bounds[sp.index + 1])
    results = []
    for sum_gradients in (False, True):
        own = rows[at].clone().requires_grad_()
        joined = gather_rows(own, counts, sp, sum_gradients)
        assert torch.equal(joined, rows)
        (joined * (rows + sp.index)).sum().backward()
        results.append((own.grad - rows[at]).tolist())
    half = rows[at, 0].bfloat16().requires_grad_()
    gather_rows(half, counts, sp, sum_gradients=True).sum().backward()
    empty = gather_rows(torch.zeros(0, 2), (0,) * 4, sp)
    return [*results, half.grad.tolist(), len(empty)]


def test_groups_and_exchanges_are_right_on_four_processes():
    results = run_distributed(describe_groups, 4)

    places = [sp[:3] for sp, *_ in results]
    assert places == [(0, 0, None), (1, 0, None), (0, 1, None), (1, 1, None)]
    assert [sp[3:] for sp, *_ in results] == [
        ([0, 1], [0, 1], [0, 2]),
        ([0, 1], [0, 1], [1, 3]),
        ([2, 3], [2, 3], [0, 2]),
        ([2, 3], [2, 3], [1, 3]),
    ]
    assert [both for _, both, *_ in results] == [
        (0, 1, None, [0, 1], [0, 2]),
        (1, 1, None, [0, 1], [1, 3]),
        (2, 1, None, [2, 3], [0, 2]),
        (3, 1, None, [2, 3], [1, 3]),
    ]
    for rank, (_, _, exchange, exchange_in_ring, gather) in enumerate(results):
        assert exchange <= 1e-6 and exchange_in_ring <= 1e-6
        # Each rank weighs the rows by themselves plus its index: its own gradient is off by its index, the
        # sum over ranks is off by 3 times the rows plus 0 + 1 + 2 + 3.
        held = ([[0, 1], [2, 3]], [], [[4, 5], [6, 7], [8, 9]], [[10, 11]])[rank]
        assert gather[0] == [[rank, rank]] * len(held)
        assert gather[1] == [[3 * value + 6 for value in row] for row in held]
        assert gather[2] == [4] * len(held)
        assert gather[3] == 0


def gather_in_pieces(rank, world_size):
    """For several divisions the pieces that went wrong, and the memory beside the result of 8 and of 1."""
    sp = SequenceParallel.build(range(world_size), world_size, 1, gather_pieces=3)
    assert sp.gather_pieces == 3 and SequenceParallel.none().gather_pieces == 1
    wrong = []
    for counts in ((5, 2, 0, 7), (0, 3, 0, 0), (4, 4, 4, 4), (1, 6, 2, 1)):
        counts = counts[:world_size]
        for pieces, sum_gradients in itertools.product((1, 2, 3, 7, 50), (False, True)):
            if not gathers_exactly(counts, pieces, sum_gradients, sp):
                wrong.append((counts, pieces, sum_gradients))
    counts = (4096,) + (0,) * (world_size - 1)
    return wrong, [memory_beside_the_result(counts, pieces, sp) for pieces in (8, 1)]


def gathers_exactly(counts, pieces, sum_gradients, sp):
    """Whether rows and gradients are those of plain slices; numbers are whole, so sums have one result."""
    generator = torch.Generator().manual_seed(sum(counts))
    whole = torch.randint(-9, 9, (sum(counts), 2, 3), generator=generator).float()
    weights = torch.randint(-9, 9, (sp.size, *whole.shape), generator=generator).float()  # of each rank
    at = slice(sum(counts[: sp.index]), sum(counts[: sp.index + 1]))
    own = whole[at].transpose(1, 2).contiguous().requires_grad_()  # in another order of memory

    joined = gather_rows(own.transpose(1, 2), counts, sp, sum_gradients, pieces)
    (joined * weights[sp.index]).sum().backward()

    used = weights.sum(0) if sum_gradients else weights[sp.index]
    return torch.equal(joined, whole) and torch.equal(own.grad.transpose(1, 2), used[at])


def memory_beside_the_result(counts, pieces, sp):
    """MiB that a gather and its backward pass need at the same time, beside what they leave."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # what is freed leaves the process at once
    own = torch.ones(counts[sp.index], 4096, requires_grad=True)  # 64 MiB on the rank that has them
    before = resident("VmRSS")
    joined = gather_rows(own, counts, sp, sum_gradients=True, pieces=pieces)
    joined.backward(torch.ones_like(joined))
    left = resident("VmRSS") - before
    return resident("VmHWM") - before - left


def resident(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if name in line)
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_gathered_in_pieces_are_the_same_and_need_less_memory(world_size):
    results = run_distributed(gather_in_pieces, world_size)

    for wrong, (in_pieces, at_once) in results:
        assert wrong == []
        assert at_once >= 64 * world_size  # every rank holds the most rows of a rank for each
        assert in_pieces <= 0.4 * at_once
