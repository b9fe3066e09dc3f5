# SPDX-License-Identifier: Apache-2.0
"""Windows and chunks, with shared prompts or not, against one dense attention with a mask token by token."""

import itertools

import pytest
import torch

from tests.helpers.copies import CountCopies
from tests.helpers.distributed import run_distributed
from tests.helpers.plain_attention import PlainKernel
from tests.models.attention.test_layouts import masked, size_of, tensors, with_gradients
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import SequenceGroup, shard_plan
from verl.models.attention.kernels import AttentionRule
from verl.models.attention.layouts import Blocks, PackedLayout
from verl.models.attention.sequence_parallel_layouts import sequence_layout
from verl.models.attention.varlen_kernels import KernelChoice, use_kernels

ROWS = [(9, []), (1, []), (0, []), (8, []), (13, [])]  # sequences that share nothing
GROUPS = [(9, [3, 12, 0, 4]), (1, [1, 9]), (7, []), (8, [5, 5]), (2, [0, 0])]
WINDOWS = [AttentionRule(0.3, window=size) for size in (1, 2, 5, 9, 14)]
CHUNKS = [AttentionRule(0.3, chunk=size) for size in (1, 3, 4, 8, 15)]
CAPPED = [AttentionRule(0.3, window=4, softcap=0.5), AttentionRule(0.3, chunk=4, softcap=0.5)]
BOTH = AttentionRule(0.3, window=2, chunk=5)


def layout_of(groups, device=None, blocks=None):
    if any(responses for _, responses in groups):
        return PackedLayout.of_groups(groups, device, blocks)
    bounds = torch.tensor([0, *itertools.accumulate(prompt for prompt, _ in groups)])
    return PackedLayout.of(bounds, device, blocks)


def seen_by(groups, rule):
    """(N, N) bool, token by token: its group, its response if it is in one, its position in the row."""
    tokens = []
    for group, (prompt, responses) in enumerate(groups):
        tokens += [(group, None, position) for position in range(prompt)]
        for response, length in enumerate(responses):
            tokens += [(group, response, prompt + position) for position in range(length)]
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for query, key in itertools.product(range(len(tokens)), repeat=2):
        (group, response, at), (key_group, key_response, key_at) = tokens[query], tokens[key]
        is_near = rule.window is None or at - key_at < rule.window
        is_in_chunk = rule.chunk is None or at // rule.chunk == key_at // rule.chunk
        is_own = group == key_group and key_response in (None, response)
        seen[query, key] = is_own and key_at <= at and is_near and is_in_chunk
    return seen


def assert_exact(groups, rule, tolerance=1e-6):
    inputs = tensors(size_of(groups))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ours = with_gradients(layout_of(groups).attend(*inputs, rule), inputs)
    theirs = with_gradients(masked(*exact, seen_by(groups, rule), rule.softcap), exact)
    for left, right in zip(ours, theirs, strict=True):
        assert (left - right).abs().max() <= tolerance * right.abs().max().clamp(min=1)


@pytest.mark.parametrize("rule", [*WINDOWS, *CHUNKS, *CAPPED, BOTH])
@pytest.mark.parametrize("groups", [ROWS, GROUPS, GROUPS[:1], GROUPS[3:4]])
def test_tokens_see_their_window_or_chunk_across_prompt_and_response(groups, rule):
    assert_exact(groups, rule)


def test_the_end_of_a_prompt_is_copied_for_each_response_but_the_first():
    shared = PackedLayout.of_groups([(6, [2, 3, 1])])
    shared.attend(*tensors(12), AttentionRule(0.3, window=3))
    (call,) = shared._local.values()

    # Rows: the prompt with its first response, and the others with the prompt's last two tokens.
    assert call.queries.lengths == (8, 3, 1) and call.keys.lengths == (8, 5, 3)
    assert call.taken.tolist() == [*range(8), 4, 5, 8, 9, 10, 4, 5, 11]


def test_a_chunk_of_a_response_that_begins_in_the_prompt_has_the_prompts_tokens():
    shared = PackedLayout.of_groups([(6, [2, 5])])
    shared.attend(*tensors(13), AttentionRule(0.3, chunk=4))
    (call,) = shared._local.values()

    # Positions 0-3, 4-7, and in the second response 6-7 behind 4-5, and 8-10.
    assert call.queries.lengths == (4, 4, 2, 3) and call.keys.lengths == (4, 4, 4, 3)
    assert call.taken.tolist() == [*range(8), 4, 5, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("groups", [ROWS, GROUPS])
def test_a_window_or_chunk_of_the_longest_row_has_no_effect(groups):
    inputs, layout = tensors(size_of(groups)), layout_of(groups)
    longest = max(prompt + max(responses, default=0) for prompt, responses in groups)
    plain = layout.attend(*inputs, AttentionRule(0.3))

    for rule in (AttentionRule(0.3, window=longest), AttentionRule(0.3, chunk=longest)):
        assert torch.equal(layout.attend(*inputs, rule), plain)
    for rule in (AttentionRule(0.3, window=longest - 1), AttentionRule(0.3, chunk=longest - 1)):
        assert not torch.equal(layout.attend(*inputs, rule), plain)


@pytest.mark.parametrize("rule", [WINDOWS[2], CHUNKS[2]])
@pytest.mark.parametrize("groups", [ROWS, GROUPS])
def test_windows_and_chunks_take_one_call_of_a_kernel_for_variable_lengths(groups, rule):
    kernel = PlainKernel()
    previous = use_kernels(KernelChoice((kernel,), is_required=True))
    try:
        assert_exact(groups, rule, tolerance=2e-6)
    finally:
        use_kernels(previous)

    assert kernel.calls == ["forward", "backward"]


def test_the_layers_of_a_model_share_the_rows_of_a_window():
    layout, inputs = layout_of(GROUPS), tensors(size_of(GROUPS))
    layout.attend(*inputs, WINDOWS[1])

    with CountCopies() as counted:
        layout.attend(*inputs, WINDOWS[1])

    assert counted.copies == 0 and len(layout._local) == 1


def test_a_block_in_a_shared_prompt_is_whole_under_a_window():
    blocks, rule = Blocks(((2, 7),)), AttentionRule(0.3, window=3)
    inputs = tensors(size_of(GROUPS))
    seen = seen_by(GROUPS, rule)
    for query, key in itertools.product(range(2, 7), repeat=2):
        seen[query, key] |= key > query

    ours = with_gradients(layout_of(GROUPS, blocks=blocks).attend(*inputs, rule), inputs)

    for left, right in zip(ours, with_gradients(masked(*inputs, seen), inputs), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=0)


def errors_on_this_rank(rank, world_size):
    sp = SequenceParallel.build(world_size, 1)
    errors = []
    for groups, rule in itertools.product((ROWS, GROUPS), (WINDOWS[2], CHUNKS[2], CAPPED[0])):
        inputs = tensors(size_of(groups))
        weights = torch.randn(1, size_of(groups), 4, 8, generator=torch.Generator().manual_seed(1))
        out = layout_of(groups).attend(*inputs, rule)
        grads = torch.autograd.grad((out * weights).sum(), inputs)
        plan = shard_plan([SequenceGroup(prompt, tuple(responses)) for prompt, responses in groups], sp)
        real, at = ~plan.is_padding, plan.local[~plan.is_padding]
        local = [tensor.detach()[:, :, plan.local].requires_grad_() for tensor in inputs]
        result = sequence_layout(plan, sp).attend(*local, rule)[:, real]
        own = torch.autograd.grad((result * weights[:, at]).sum(), local)
        errors.append((result - out[:, at]).abs().max().item())
        errors += [
            (left[:, :, real] - right[:, :, at]).abs().max().item()
            for left, right in zip(own, grads, strict=True)
        ]
    return max(errors)


def test_windows_and_chunks_over_two_processes_equal_those_in_one():
    assert max(run_distributed(errors_on_this_rank, 2)) <= 1e-5
