# SPDX-License-Identifier: Apache-2.0
"""Blocks of tokens that see each other whole, against one dense attention with a mask token by token."""

import itertools

import pytest
import torch

from tests.helpers.copies import CountCopies
from tests.helpers.distributed import run_distributed
from tests.helpers.plain_attention import PlainKernel
from tests.models.attention.test_layouts import masked, seen_in, size_of, tensors, with_gradients
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import SequenceGroup, shard_plan
from verl.models.attention.kernels import FULL, AttentionRule
from verl.models.attention.layouts import Blocks, PackedLayout
from verl.models.attention.sequence_parallel_layouts import sequence_layout
from verl.models.attention.varlen_kernels import KernelChoice, use_kernels

ROWS = [(9, []), (1, []), (7, []), (12, [])]  # sequences that share nothing
GROUPS = [(9, [3, 2, 0, 4]), (1, [1]), (7, []), (6, [5, 5])]
# at a start, adjacent, of one token, at an end
BLOCKS = Blocks(((0, 3), (3, 5), (6, 7), (7, 9)))
RULES = [AttentionRule(0.3), AttentionRule(0.3, softcap=0.5)]
WINDOWS = [AttentionRule(0.3, window=2), AttentionRule(0.3, window=4, softcap=0.5)]


def layout_of(groups, blocks, device=None):
    if any(responses for _, responses in groups):
        return PackedLayout.of_groups(groups, device, blocks)
    bounds = torch.tensor([0, *itertools.accumulate(prompt for prompt, _ in groups)])
    return PackedLayout.of(bounds, device, blocks)


def seen_with_blocks(groups, blocks, window=None):
    """(N, N) bool: earlier tokens in the window, and all later ones of the same block."""
    seen = seen_in(groups)
    if window is not None:
        behind = torch.arange(len(seen))[:, None] - torch.arange(len(seen))
        seen &= behind < window
    for start, stop in blocks.bounds:
        for query, key in itertools.product(range(start, stop), repeat=2):
            seen[query, key] |= key > query
    return seen


def assert_exact(layout, groups, blocks, rule, tolerance=1e-6):
    inputs = tensors(size_of(groups))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ours = with_gradients(layout.attend(*inputs, rule), inputs)
    seen = seen_with_blocks(groups, blocks, rule.window)
    for left, right in zip(ours, with_gradients(masked(*exact, seen, rule.softcap), exact), strict=True):
        assert (left - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.parametrize("rule", [*RULES, *WINDOWS])
@pytest.mark.parametrize("bounds", [BLOCKS.bounds, ((4, 8),), ((0, 9), (11, 16), (17, 29))])
def test_tokens_of_a_block_see_its_later_tokens_in_packed_rows(bounds, rule):
    blocks = Blocks(bounds)

    assert_exact(layout_of(ROWS, blocks), ROWS, blocks, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bounds", [BLOCKS.bounds, ((4, 8),), ((1, 9), (21, 24), (27, 33))])
def test_tokens_of_a_block_see_its_later_tokens_in_shared_prompts(bounds, rule):
    blocks = Blocks(bounds)

    assert_exact(layout_of(GROUPS, blocks), GROUPS, blocks, rule)


@pytest.mark.parametrize("groups", [ROWS, GROUPS])
def test_a_block_is_needed_for_the_result(groups):
    inputs = tensors(size_of(groups))

    plain, whole = (layout_of(groups, blocks).attend(*inputs, RULES[0]) for blocks in (None, BLOCKS))

    differs = (plain - whole).abs().amax((0, 2, 3)) > 1e-3
    assert differs.nonzero()[:, 0].tolist() == [0, 1, 3, 7]  # all but the last token of each block


def test_blocks_are_cut_where_sequences_end():
    # Two rows of media tokens only, which are adjacent in the packed sequence.
    found = Blocks.of(torch.arange(2, 12)).within([5, 3, 0, 4])

    assert found.bounds == ((2, 5), (5, 8), (8, 12))
    groups = [(5, []), (3, []), (4, [])]
    assert_exact(layout_of(groups, Blocks.of(torch.arange(2, 12))), groups, found, RULES[0])


def test_blocks_are_runs_of_adjacent_tokens():
    tokens = torch.tensor([2, 3, 4, 7, 9, 10])

    assert Blocks.of(tokens).bounds == ((2, 5), (7, 8), (9, 11))
    assert Blocks.of(tokens[:0]).bounds == ()


def test_blocks_have_an_effect_in_layers_of_their_types_only():
    blocks = BLOCKS._replace(layer_types=frozenset({"sliding_attention"}))
    inputs = tensors(size_of(ROWS))
    rules = [AttentionRule(0.3, layer_type=kind) for kind in ("full_attention", "sliding_attention")]

    full, sliding = (layout_of(ROWS, blocks).attend(*inputs, rule) for rule in rules)

    assert torch.equal(full, layout_of(ROWS, None).attend(*inputs, rules[0]))
    torch.testing.assert_close(sliding, layout_of(ROWS, BLOCKS).attend(*inputs, rules[0]))


def test_blocks_of_single_tokens_take_no_call():
    assert not layout_of(ROWS, Blocks(((3, 4), (7, 8)))).later


@pytest.mark.parametrize(("groups", "rule"), [(ROWS, RULES[0]), (ROWS, WINDOWS[0]), (GROUPS, RULES[1])])
def test_blocks_take_one_call_of_a_kernel_for_variable_lengths(groups, rule):
    kernel = PlainKernel()
    previous = use_kernels(KernelChoice((kernel,), is_required=True))
    try:
        layout_of(groups, None).attend(*tensors(size_of(groups)), rule)
        without = len(kernel.calls)
        kernel.calls.clear()
        assert_exact(layout_of(groups, BLOCKS), groups, BLOCKS, rule, tolerance=2e-6)
    finally:
        use_kernels(previous)

    assert kernel.calls.count("forward") == kernel.calls.count("backward") == without + 1


def test_the_rows_of_blocks_reach_a_device_in_one_copy_and_nothing_is_read_back():
    with CountCopies() as counted:
        layout = layout_of(GROUPS, BLOCKS, "meta")

    assert counted.copies == 2  # the rows of the sequences, and those of the blocks
    assert layout.later[FULL].queries.cu_rows.device.type == "meta"


def errors_on_this_rank(rank, world_size):
    sp = SequenceParallel.build(world_size, 1)
    errors = []
    for groups in (ROWS, GROUPS):
        inputs = tensors(size_of(groups))
        weights = torch.randn(1, size_of(groups), 4, 8, generator=torch.Generator().manual_seed(1))
        out = layout_of(groups, BLOCKS).attend(*inputs, RULES[0])
        grads = torch.autograd.grad((out * weights).sum(), inputs)
        plan = shard_plan([SequenceGroup(prompt, tuple(responses)) for prompt, responses in groups], sp)
        real, at = ~plan.is_padding, plan.local[~plan.is_padding]
        local = [tensor.detach()[:, :, plan.local].requires_grad_() for tensor in inputs]
        result = sequence_layout(plan, sp, blocks=BLOCKS).attend(*local, RULES[0])[:, real]
        own = torch.autograd.grad((result * weights[:, at]).sum(), local)
        errors.append((result - out[:, at]).abs().max().item())
        errors += [
            (left[:, :, real] - right[:, :, at]).abs().max().item()
            for left, right in zip(own, grads, strict=True)
        ]
    return max(errors)


def test_blocks_over_two_processes_equal_blocks_in_one():
    assert max(run_distributed(errors_on_this_rank, 2)) <= 1e-5


def test_a_ring_refuses_blocks():
    sp = SequenceParallel(1, 2)
    plan = shard_plan([SequenceGroup(20)], sp)

    with pytest.raises(NotImplementedError, match=r"both directions.*use `ulysses_size`"):
        sequence_layout(plan, sp, blocks=BLOCKS)
    sequence_layout(plan, sp, blocks=Blocks(()))
