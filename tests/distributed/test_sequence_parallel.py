# SPDX-License-Identifier: Apache-2.0
import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from tests.helpers.distributed import run_distributed
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import SequenceGroup, SPRows, shard_plan
from verl.distributed.ulysses import gather_rows, heads_to_tokens, tokens_to_heads

pytestmark = pytest.mark.heavy

M_MMAP_THRESHOLD = -3  # of malloc.h
SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (2, 3)]
PACKED = {
    "one token": [SequenceGroup(1)],
    "packed": [SequenceGroup(11), SequenceGroup(1), SequenceGroup(0), SequenceGroup(30), SequenceGroup(4)],
    "shared": [SequenceGroup(9, (3, 1, 5)), SequenceGroup(2, (4,)), SequenceGroup(13, (0, 2, 7))],
}


def ranks_of(ulysses, ring):
    return [SequenceParallel(ulysses, ring, index=index) for index in range(ulysses * ring)]


def owner_by_hand(groups, ring):
    """Ring rank of each token, for segments long enough that no chunk is empty."""
    owners = []
    for group in groups:
        for length in (group.prompt, *group.responses):
            chunk = length // (2 * ring)
            owners += [min(position // chunk, 2 * ring - 1 - position // chunk) for position in range(length)]
    return owners


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("packed", PACKED)
def test_every_token_of_a_packed_sequence_is_on_one_rank(packed, sizes):
    plans = [shard_plan(PACKED[packed], sp) for sp in ranks_of(*sizes)]

    joined = torch.cat([plan.local for plan in plans])
    real = ~torch.cat([plan.is_padding for plan in plans])
    total = sum(group.prompt + sum(group.responses) for group in PACKED[packed])
    assert sorted(joined[real].tolist()) == list(range(total))
    for plan in plans:
        assert joined[plan.positions].tolist() == list(range(total))
        assert len(plan.local) == len(plans[0].local)


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_hold_equal_numbers_of_tokens_up_to_rounding(sizes):
    groups = [
        SequenceGroup(1),
        SequenceGroup(3),
        SequenceGroup(1),
        SequenceGroup(1),
        SequenceGroup(2),
        SequenceGroup(5),
        SequenceGroup(1),
    ]
    plan = shard_plan(groups * 20, ranks_of(*sizes)[0])

    size = sizes[0] * sizes[1]
    assert len(plan.local) <= -(-14 * 20 // size) + 1


def test_ring_ranks_hold_chunks_from_both_ends_of_every_segment():
    groups = [SequenceGroup(8), SequenceGroup(16, (8, 8))]  # four chunks each

    plans = [shard_plan(groups, sp) for sp in ranks_of(1, 2)]

    owners = torch.empty(40, dtype=torch.int64)
    for rank, plan in enumerate(plans):
        assert not plan.is_padding.any()
        owners[plan.local] = rank
    assert owners.tolist() == owner_by_hand(groups, 2)
    # First chunks of all segments, prompts before responses: 0 1 | 8..11 | 24 25 | 32 33, then last chunks.
    first = [0, 1, 8, 9, 10, 11, 24, 25, 32, 33]
    assert plans[0].local.tolist() == [*first, 6, 7, 20, 21, 22, 23, 30, 31, 38, 39]


def test_ulysses_ranks_hold_contiguous_shards_padded_at_the_end():
    plans = [shard_plan([SequenceGroup(3), SequenceGroup(2)], sp) for sp in ranks_of(2, 1)]

    assert [plan.local.tolist() for plan in plans] == [[0, 1, 2], [3, 4, 0]]
    assert [plan.is_padding.tolist() for plan in plans] == [[False] * 3, [False, False, True]]


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_are_divided_over_their_ranks_and_gathered_in_order(sizes):
    rows = torch.tensor([40, 3, 3, 0, 17, 25, 39, 1])
    values = torch.arange(100, 146)  # a value for each token

    plans = [(shard_plan(PACKED["packed"], sp), sp) for sp in ranks_of(*sizes)]

    parts = [SPRows.of(rows, plan, sp) for plan, sp in plans]
    found = [values[plan.local][part.local] for (plan, _), part in zip(plans, parts, strict=True)]
    for part in parts:
        assert part.counts == tuple(len(each) for each in found)
        assert torch.cat(found)[part.order].tolist() == values[rows].tolist()


def test_an_empty_packed_sequence_is_refused():
    with pytest.raises(ValueError, match="without tokens"):
        shard_plan([SequenceGroup(0)], SequenceParallel())


def describe_groups(rank, world_size):
    import torch.distributed as dist

    sp = SequenceParallel.build(2, 1)
    both = SequenceParallel.build(2, 2)
    ranks = dist.get_process_group_ranks
    with pytest.raises(ValueError, match="4 ranks cannot be divided by `ulysses_size` \\(3\\)"):
        SequenceParallel.build(3, 1)
    return [
        (sp.index, sp.dp_index, sp.ring_group, ranks(sp.group), ranks(sp.ulysses_group), ranks(sp.dp_group)),
        (both.index, both.dp_size, ranks(both.dp_group), ranks(both.ulysses_group), ranks(both.ring_group)),
        check_exchange(sp),
        check_exchange(both),
        check_gather(both),
    ]


def check_exchange(sp):
    """Largest difference of the exchange and its gradients from slices of the full tensors."""
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

    coordinates = [sp[:3] for sp, *_ in results]
    assert coordinates == [(0, 0, None), (1, 0, None), (0, 1, None), (1, 1, None)]
    assert [sp[3:] for sp, *_ in results] == [
        ([0, 1], [0, 1], [0, 2]),
        ([0, 1], [0, 1], [1, 3]),
        ([2, 3], [2, 3], [0, 2]),
        ([2, 3], [2, 3], [1, 3]),
    ]
    assert [both for _, both, *_ in results] == [
        (0, 1, [0], [0, 1], [0, 2]),
        (1, 1, [1], [0, 1], [1, 3]),
        (2, 1, [2], [2, 3], [0, 2]),
        (3, 1, [3], [2, 3], [1, 3]),
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


def gather_in_chunks(rank, world_size):
    """Cases with wrong results, and the extra memory of 8 chunks and of 1."""
    sp = SequenceParallel.build(world_size, 1, gather_chunks=3)
    assert sp.gather_chunks == 3 and SequenceParallel().gather_chunks == 1
    wrong = []
    for counts in ((5, 2, 0, 7), (0, 3, 0, 0), (4, 4, 4, 4), (1, 6, 2, 1)):
        counts = counts[:world_size]
        for chunks, sum_gradients in itertools.product((1, 2, 3, 7, 50), (False, True)):
            if not gathers_exactly(counts, chunks, sum_gradients, sp):
                wrong.append((counts, chunks, sum_gradients))
    counts = (4096,) + (0,) * (world_size - 1)
    return wrong, [extra_memory(counts, chunks, sp) for chunks in (8, 1)]


def gathers_exactly(counts, chunks, sum_gradients, sp):
    """Compare rows and gradients with plain slices; whole numbers make sums exact."""
    generator = torch.Generator().manual_seed(sum(counts))
    whole = torch.randint(-9, 9, (sum(counts), 2, 3), generator=generator).float()
    weights = torch.randint(-9, 9, (sp.size, *whole.shape), generator=generator).float()  # of each rank
    at = slice(sum(counts[: sp.index]), sum(counts[: sp.index + 1]))
    own = whole[at].transpose(1, 2).contiguous().requires_grad_()  # in another order of memory

    joined = gather_rows(own.transpose(1, 2), counts, sp, sum_gradients, chunks)
    (joined * weights[sp.index]).sum().backward()

    used = weights.sum(0) if sum_gradients else weights[sp.index]
    return torch.equal(joined, whole) and torch.equal(own.grad.transpose(1, 2), used[at])


def extra_memory(counts, chunks, sp):
    """Peak MiB of a gather and its backward pass, minus what they leave allocated."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # what is freed leaves the process at once
    own = torch.ones(counts[sp.index], 4096, requires_grad=True)  # 64 MiB on the rank that has them
    before = resident("VmRSS")
    joined = gather_rows(own, counts, sp, sum_gradients=True, chunks=chunks)
    joined.backward(torch.ones_like(joined))
    left = resident("VmRSS") - before
    return resident("VmHWM") - before - left


def resident(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if name in line)
    return int(line.split()[1]) / 1024


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_gathered_in_chunks_are_the_same_and_need_less_memory(world_size):
    results = run_distributed(gather_in_chunks, world_size)

    for wrong, (in_chunks, at_once) in results:
        assert wrong == []
        assert at_once >= 64 * world_size  # every rank receives 64 MiB from each rank
        assert in_chunks <= 0.4 * at_once
