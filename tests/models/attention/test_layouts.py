# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch

from tests.helpers.copies import CountCopies
from tests.helpers.largest_tensor import LargestTensor
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import SequenceGroup, shard_plan
from verl.models.attention.kernels import AttentionRule
from verl.models.attention.layouts import PackedLayout
from verl.models.attention.sequence_parallel_layouts import sequence_layout

RULE = AttentionRule(0.3)
# A group without responses, empty responses, one response, single tokens, neighbours of equal length.
GROUPS = [(5, [2, 3, 0, 4]), (1, [1]), (7, []), (3, [2, 2, 2]), (2, [0, 6]), (4, [0, 0])]


def tensors(size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, size, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def size_of(groups):
    return sum(prompt + sum(responses) for prompt, responses in groups)


def seen_in(groups):
    """(N, N) bool, token by token: which key each query sees."""
    tokens = []  # (group, response or None for the prompt)
    for group, (prompt, responses) in enumerate(groups):
        tokens += [(group, None)] * prompt
        for response, length in enumerate(responses):
            tokens += [(group, response)] * length
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for query, key in itertools.product(range(len(tokens)), repeat=2):
        (group, response), (key_group, key_response) = tokens[query], tokens[key]
        seen[query, key] = group == key_group and key_response in (None, response) and key <= query
    return seen


def masked(query, key, value, seen, softcap=None):
    """One dense attention over all packed tokens: (1, N, H, D)."""
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * RULE.scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)


def with_gradients(out, inputs):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def test_adjacent_rows_of_equal_length_are_joined_and_empty_ones_skipped():
    found = PackedLayout.of(torch.tensor([0, 3, 3, 6, 10, 13]))

    assert [(run.rows, run.q_length) for run in found.calls[0].runs] == [(2, 3), (1, 4), (1, 3)]


def test_the_runs_of_a_tensor_are_cached():
    bounds = torch.tensor([0, 3, 5])

    assert PackedLayout.of(bounds).calls[0].runs is PackedLayout.of(bounds).calls[0].runs


def spans_of(layout):
    """Devices and runs of a layout's calls."""
    calls = layout.calls if isinstance(layout, PackedLayout) else itertools.chain(*layout.calls)
    return [(span.cu_rows.device.type, call.runs) for call in calls for span in (call.queries, call.keys)]


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize(
    "groups", [[SequenceGroup(5), SequenceGroup(3)], [SequenceGroup(*g) for g in GROUPS]]
)
def test_a_layout_on_a_device_takes_one_copy_and_reads_nothing_back(groups, ring):
    sp = SequenceParallel(1, ring)
    plan = shard_plan([SequenceGroup(*group) for group in groups], sp)
    on_cpu = sequence_layout(plan, sp)

    with CountCopies() as counted:
        layout = sequence_layout(plan, sp, "meta")

    assert counted.copies == 1
    assert spans_of(layout) == [("meta", runs) for _, runs in spans_of(on_cpu)]


def test_blocks_of_a_tower_share_one_copy_of_boundaries_from_the_cpu():
    bounds = torch.tensor([0, 3, 5])

    with CountCopies() as counted:
        layouts = [PackedLayout.of(bounds, "meta") for _ in range(3)]

    assert counted.copies == 1
    first, *others = (layout.calls[0].queries.cu_rows for layout in layouts)
    assert first.device.type == "meta" and first.dtype == torch.int32
    assert all(other is first for other in others)
    assert [(run.rows, run.q_length) for run in layouts[2].calls[0].runs] == [(1, 3), (1, 2)]


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("groups", [GROUPS, GROUPS[:1], GROUPS[1:2], GROUPS[2:3]])
def test_each_response_attends_to_its_prompt_and_to_itself(groups, softcap):
    inputs = tensors(size_of(groups))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]

    rule = AttentionRule(RULE.scale, softcap=softcap)
    ours = with_gradients(PackedLayout.of_groups(groups).attend(*inputs, rule), inputs)

    theirs = with_gradients(masked(*exact, seen_in(groups), softcap), exact)
    torch.testing.assert_close(ours[0].double(), theirs[0], atol=1e-6, rtol=0)
    for left, right in zip(ours[1:], theirs[1:], strict=True):
        assert (left - right).abs().max() <= 1e-6 * right.abs().max()


def test_bfloat16_results_are_within_rounding():
    inputs = tensors(size_of(GROUPS), torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]

    ours = with_gradients(PackedLayout.of_groups(GROUPS).attend(*inputs, RULE), inputs)

    assert {tensor.dtype for tensor in ours} == {torch.bfloat16}
    for left, right in zip(ours, with_gradients(masked(*exact, seen_in(GROUPS)), exact), strict=True):
        assert (left - right).abs().max() <= 2**-7 * right.abs().max()  # two roundings to 8 bits


def test_a_shared_prompt_equals_repeated_prompts():
    prompt, responses = 6, [3, 1, 3, 5]
    inputs = tensors(prompt + sum(responses))
    stops = list(itertools.accumulate(responses, initial=prompt))
    rows = [[*range(prompt), *range(*bounds)] for bounds in itertools.pairwise(stops)]
    index = torch.tensor([*itertools.chain(*rows)])
    bounds = torch.tensor([0, *itertools.accumulate(len(row) for row in rows)])

    shared = PackedLayout.of_groups([(prompt, responses)]).attend(*inputs, RULE)
    repeated = PackedLayout.of(bounds).attend(*(tensor[:, :, index] for tensor in inputs), RULE)

    torch.testing.assert_close(shared[:, index], repeated, atol=1e-6, rtol=0)
    weights = torch.randn(repeated.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((shared[:, index] * weights).sum(), inputs)
    for left, right in zip(ours, torch.autograd.grad((repeated * weights).sum(), inputs), strict=True):
        assert (left - right).abs().max() <= 1e-6 * right.abs().max()


def test_groups_of_one_response_are_plain_sequences():
    groups = [(4, [3]), (2, [0, 5]), (3, [])]
    inputs = tensors(17)
    shared = PackedLayout.of_groups(groups)

    out = shared.attend(*inputs, RULE)

    assert len(shared.calls) == 1
    assert torch.equal(out, PackedLayout.of(torch.tensor([0, 7, 14, 17])).attend(*inputs, RULE))


def test_the_longest_row_of_a_shared_layout_is_a_prompt_with_its_longest_response():
    shared = PackedLayout.of_groups([(5, [2, 0]), (4, [1])])

    assert shared.longest_row == 7


def test_attention_to_later_tokens_is_refused_with_a_shared_prompt():
    with pytest.raises(NotImplementedError, match=r"later tokens.*share_prompt` to false"):
        PackedLayout.of_groups([(5, [2, 1])]).attend(*tensors(8), AttentionRule(1.0, is_causal=False))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        PackedLayout.of_groups([(0, [2])])


def test_scores_of_the_whole_prompt_are_never_held():
    # Scores of 2048 response tokens over a prompt of 2048 would be 4 Mi numbers for each head.
    inputs = torch.randn(1, 1, 4096, 8, requires_grad=True)
    with LargestTensor() as largest:
        PackedLayout.of_groups([(2048, [256] * 8)]).attend(inputs, inputs, inputs, RULE).sum().backward()

    assert largest.numel <= 4096 * 8
