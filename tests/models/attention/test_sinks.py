# SPDX-License-Identifier: Apache-2.0
"""Sinks: a score of each head that takes part in the softmax and has no value."""

import math

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.plain_attention import PlainKernel
from tests.models.attention.test_layouts import size_of, tensors
from tests.models.attention.test_local_rows import GROUPS, ROWS, layout_of, seen_by
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import SequenceGroup, shard_plan
from verl.models.attention.kernels import AttentionRule
from verl.models.attention.layouts import PackedLayout
from verl.models.attention.sequence_parallel_layouts import sequence_layout
from verl.models.attention.varlen_kernels import KernelChoice, use_kernels

RULES = [AttentionRule(0.3), AttentionRule(0.3, window=4), AttentionRule(0.3, softcap=0.5)]


def sinks_of(heads=4):
    return torch.tensor([-4.0, 0.0, 1.5, 3.0])[:heads].requires_grad_()


def dense(query, key, value, sinks, seen, rule):
    """(1, N, H, D), with one more column of scores."""
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    column = sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)


def with_gradients(out, inputs):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def test_a_sink_matches_a_hand_computed_example():
    # Scores 0 of the key and ln 3 of the sink: the value 8 has a weight of 1/4. The gradient of the sink
    # is -(1/4)(3/4) x 8.
    one, value = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 8.0)
    sink = torch.tensor([math.log(3)], requires_grad=True)

    out = PackedLayout.of(torch.tensor([0, 1])).attend(one, one, value, AttentionRule(1.0), sink)
    out.sum().backward()

    assert out.item() == pytest.approx(2.0)
    assert sink.grad.item() == pytest.approx(-1.5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("groups", [ROWS, GROUPS])
def test_sinks_take_part_in_the_softmax_of_every_query(groups, rule):
    inputs = [*tensors(size_of(groups)), sinks_of()]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]

    ours = with_gradients(layout_of(groups).attend(*inputs[:3], rule, inputs[3]), inputs)

    theirs = with_gradients(dense(*exact, seen_by(groups, rule), rule), exact)
    for left, right in zip(ours, theirs, strict=True):
        assert (left - right).abs().max() <= 2e-6 * right.abs().max()


def test_sinks_need_nothing_of_a_kernel_for_variable_lengths():
    kernel, inputs = PlainKernel(), [*tensors(size_of(GROUPS)), sinks_of()]
    expected = with_gradients(layout_of(GROUPS).attend(*inputs[:3], RULES[1], inputs[3]), inputs)
    previous = use_kernels(KernelChoice((kernel,), is_required=True))
    try:
        found = with_gradients(layout_of(GROUPS).attend(*inputs[:3], RULES[1], inputs[3]), inputs)
    finally:
        use_kernels(previous)

    assert kernel.calls == ["forward", "backward"]
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


def errors_on_this_rank(rank, world_size):
    errors = {}
    for name, sizes in {"ulysses": (world_size, 1), "ring": (1, world_size)}.items():
        sp = SequenceParallel.build(*sizes)
        for kind, groups in {"packed": ROWS, "shared": GROUPS}.items():
            inputs = [*tensors(size_of(groups)), sinks_of()]
            weights = torch.randn(1, size_of(groups), 4, 8, generator=torch.Generator().manual_seed(1))
            out = layout_of(groups).attend(*inputs[:3], RULES[0], inputs[3])
            grads = torch.autograd.grad((out * weights).sum(), inputs)
            plan = shard_plan([SequenceGroup(prompt, tuple(responses)) for prompt, responses in groups], sp)
            real, at = ~plan.is_padding, plan.local[~plan.is_padding]
            local = [tensor.detach()[:, :, plan.local].requires_grad_() for tensor in inputs[:3]]
            sinks = sinks_of()
            result = sequence_layout(plan, sp).attend(*local, RULES[0], sinks)[:, real]
            *own, d_sinks = torch.autograd.grad((result * weights[:, at]).sum(), [*local, sinks])
            torch.distributed.all_reduce(d_sinks)
            pairs = [(result, out[:, at]), (d_sinks, grads[3])]
            pairs += [(left[:, :, real], right[:, :, at]) for left, right in zip(own, grads, strict=False)]
            errors[name, kind] = max((left - right).abs().max().item() for left, right in pairs)
    return errors


def test_sinks_over_two_processes_equal_those_in_one():
    for errors in run_distributed(errors_on_this_rank, 2):
        assert max(errors.values()) <= 1e-5, errors
