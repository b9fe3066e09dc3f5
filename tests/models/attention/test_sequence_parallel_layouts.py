# SPDX-License-Identifier: Apache-2.0
"""Attention over several processes equals attention over one, which `test_layouts` holds against a mask."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.helpers.distributed import run_distributed
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import SequenceGroup, shard_plan
from verl.models.attention.kernels import AttentionRule
from verl.models.attention.layouts import PackedLayout
from verl.models.attention.sequence_parallel_layouts import (
    RingLayout,
    UlyssesLayout,
    ring_obstacle,
    sequence_layout,
)

PLAIN = AttentionRule(0.3)
PACKED = [
    SequenceGroup(37),
    SequenceGroup(1),
    SequenceGroup(0),
    SequenceGroup(5),
    SequenceGroup(5),
    SequenceGroup(20),
]
SHARED = [
    SequenceGroup(23, (7, 1, 12)),
    SequenceGroup(9, (4,)),
    SequenceGroup(1, (0, 1)),
    SequenceGroup(17, (6, 0, 3)),
]
SEQUENCES = {
    "packed": PACKED,
    "shared": SHARED,
    "shared and not": [*SHARED, SequenceGroup(6), SequenceGroup(11, (5, 5))],
    "a token": [SequenceGroup(1)],
}


def random_tensors(groups, heads, kv_heads, dim=8):
    total = sum(group.prompt + sum(group.responses) for group in groups)
    generator = torch.Generator().manual_seed(total)
    shapes = [(1, count, total, dim) for count in (heads, kv_heads, kv_heads)] + [(1, total, heads, dim)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole(groups, tensors, rule):
    """Attention and its gradients in one process."""
    *inputs, weights = tensors
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    if any(group.responses for group in groups):
        layout = PackedLayout.of_groups(groups)
    else:
        layout = PackedLayout.of(torch.tensor([0, *torch.tensor([g.prompt for g in groups]).cumsum(0)]))
    out = layout.attend(*inputs, rule)
    (out * weights).sum().backward()
    return out.detach(), [tensor.grad for tensor in inputs]


def sharded_errors(sp, groups, kv_heads, rule=PLAIN, noise=0.0, is_checkpointed=False):
    """Largest error of this rank's outputs, and of its gradients relative to the largest gradient."""
    tensors = random_tensors(groups, 4, kv_heads)
    out, grads = whole(groups, tensors, rule)
    plan = shard_plan(groups, sp)
    *inputs, weights = tensors
    local = [tensor[:, :, plan.local] for tensor in inputs]
    for tensor in local:
        tensor[:, :, plan.is_padding] = noise
        tensor.requires_grad_()
    attend = sequence_layout(plan, sp).attend
    result = (
        checkpoint(attend, *local, rule, use_reentrant=False) if is_checkpointed else attend(*local, rule)
    )
    (result * weights[:, plan.local])[:, ~plan.is_padding].sum().backward()
    real = plan.local[~plan.is_padding]
    assert not result[:, plan.is_padding].any()
    errors = [0.0, 0.0]
    if len(real):
        errors[0] = (result[:, ~plan.is_padding] - out[:, real]).abs().max().item()
        for tensor, grad in zip(local, grads, strict=True):
            assert not tensor.grad[:, :, plan.is_padding].any()
            error = (tensor.grad[:, :, ~plan.is_padding] - grad[:, :, real]).abs().max() / grad.abs().max()
            errors[1] = max(errors[1], error.item())
    return errors


def errors_on_this_rank(rank, world_size, meshes, kv_heads):
    errors = {}
    for ulysses, ring in meshes:
        sp = SequenceParallel.build(ulysses, ring)
        for name, groups in SEQUENCES.items():
            for count in kv_heads:
                errors[ulysses, ring, name, count] = sharded_errors(sp, groups, count)
        errors[ulysses, ring, "nan in padding"] = sharded_errors(sp, SHARED, 2, noise=float("nan"))
        errors[ulysses, ring, "checkpoint"] = sharded_errors(sp, SHARED, 2, is_checkpointed=True)
        errors[ulysses, ring, "soft cap"] = sharded_errors(sp, SHARED, 2, AttentionRule(0.3, softcap=0.7))
        if ring == 1:
            rule = AttentionRule(0.3, window=5, softcap=0.7)
            errors[ulysses, ring, "window"] = sharded_errors(sp, PACKED, 2, rule)
    return errors


def assert_small(results):
    for key in results[0]:
        errors = [max(column) for column in zip(*(result[key] for result in results), strict=True)]
        assert errors[0] <= 1e-6 and errors[1] <= 1e-5, (key, errors)


def test_attention_over_two_processes_equals_attention_over_one():
    results = run_distributed(errors_on_this_rank, 2, [(2, 1), (1, 2), (1, 1)], (4, 2, 1))

    assert_small(results)


def test_attention_over_four_processes_equals_attention_over_one():
    results = run_distributed(errors_on_this_rank, 4, [(2, 2), (4, 1), (1, 4)], (2, 1))

    assert_small(results)


def count_pairs(groups, ring_size):
    """Count how often each token attends to each other, over the calls of all ring ranks."""
    ranks = [SequenceParallel(1, ring_size, index=index) for index in range(ring_size)]
    plans = [shard_plan(groups, sp) for sp in ranks]
    times = torch.zeros(len(plans[0].positions), len(plans[0].positions), dtype=torch.int64)
    for plan, sp in zip(plans, ranks, strict=True):
        for other, calls in zip(plans, RingLayout.of(plan, sp).calls, strict=True):
            for call in calls:
                queries, keys = plan.local[call.queries.tokens], other.local[call.keys.tokens]
                rows_q, rows_k = call.queries.cu_rows.tolist(), call.keys.cu_rows.tolist()
                for row in range(len(rows_q) - 1):
                    q = queries[rows_q[row] : rows_q[row + 1]]
                    k = keys[rows_k[row] : rows_k[row + 1]]
                    seen = torch.ones(len(q), len(k), dtype=torch.int64)
                    times[q[:, None], k] += seen.tril() if call.is_causal else seen
    return times


@pytest.mark.parametrize("ring_size", [2, 3, 5])
@pytest.mark.parametrize("name", SEQUENCES)
def test_ring_calls_cover_each_visible_pair_exactly_once(name, ring_size):
    expected = []  # by the definition: token by token, (group, response or None)
    for index, group in enumerate(SEQUENCES[name]):
        expected += [(index, None)] * group.prompt
        for response, length in enumerate(group.responses):
            expected += [(index, response)] * length

    times = count_pairs(SEQUENCES[name], ring_size)

    for i, (group, response) in enumerate(expected):
        for j, (other, owner) in enumerate(expected):
            is_visible = group == other and j <= i and owner in (None, response)
            assert times[i, j] == is_visible, (i, j)


def test_ring_ranks_have_the_same_work():
    groups = [SequenceGroup(400, (100, 50, 70)), SequenceGroup(90), SequenceGroup(33, (20,))]
    ranks = [SequenceParallel(1, 4, index=index) for index in range(4)]

    pairs = []  # of queries and keys
    for sp in ranks:
        layout = RingLayout.of(shard_plan(groups, sp), sp)
        calls = [call for source in layout.calls for call in source]
        rows = [
            (call.queries.cu_rows.diff() * call.keys.cu_rows.diff()).sum().item() / (1 + call.is_causal)
            for call in calls
        ]
        pairs.append(sum(rows))

    assert max(pairs) < 1.02 * min(pairs)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (AttentionRule(0.3, is_causal=False), "later tokens"),
        (AttentionRule(0.3, window=34), "sliding window of 34 .* longest has 35"),
        (AttentionRule(0.3, chunk=34), "chunks of 34 .* longest has 35"),
    ],
)
def test_a_ring_refuses_windows_chunks_and_attention_to_later_tokens(rule, reason):
    sp = SequenceParallel(1, 2)
    layout = sequence_layout(shard_plan(SHARED, sp), sp)
    inputs = torch.zeros(1, 2, 60, 8)

    with pytest.raises(NotImplementedError, match=f"{reason}.*use `ulysses_size` instead of `ring_size`"):
        layout.attend(inputs, inputs, inputs, rule)
    assert ring_obstacle(AttentionRule(0.3, window=35, chunk=35), layout.longest_row) is None


def test_an_indivisible_number_of_heads_is_refused():
    sp = SequenceParallel(4, 1)
    layout = sequence_layout(shard_plan(PACKED, sp), sp)
    inputs = torch.zeros(1, 6, 17, 8)

    assert isinstance(layout, UlyssesLayout)
    with pytest.raises(ValueError, match="`ulysses_size` \\(4\\) must divide the model's 6 attention heads"):
        layout.attend(inputs, inputs, inputs, PLAIN)


def test_without_sequence_parallelism_the_layout_is_plain():
    none = SequenceParallel()

    assert isinstance(sequence_layout(shard_plan(PACKED, none), none), PackedLayout)
    assert isinstance(sequence_layout(shard_plan(SHARED, none), none), PackedLayout)
