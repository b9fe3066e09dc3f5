# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
import torch

from verl.models.attention import kernels as partial_kernels
from verl.models.attention.kernels import AttentionRule, row_runs
from verl.models.attention.partial_attention import (
    AttentionCall,
    Span,
    attend_calls,
    merge,
    partial_backward,
    partial_forward,
)

INFINITE = float("inf")
SCALE = 0.3
RULE = AttentionRule(SCALE)
Q_LENGTHS = [4, 4, 0, 7, 1, 3]
# The keys of each row come in three parts; part 2 gives no keys to row 0, none at all to row 2.
K_LENGTHS = [[3, 3, 5, 2, 9, 1], [0, 2, 0, 1, 4, 1], [6, 6, 1, 1, 1, 2]]


def bounds(*lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def rows_of(q_lengths, k_lengths, is_causal, scale):
    call = AttentionCall.of(*Span.of_all([(0, q_lengths), (0, k_lengths)], None), is_causal)
    return call.rows(AttentionRule(scale))


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(q, k, v, seen):
    """(Nq, H, D) and (H, Nq) by the definitions, head by head."""
    repeats = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for head in range(q.shape[1]):
        weights = torch.exp(q[:, head] @ k[:, head // repeats].T * SCALE) * seen
        total = weights.sum(1, keepdim=True)
        outs.append(weights @ v[:, head // repeats] / total.clamp(min=1e-300))
        lses.append(total[:, 0].log())
    return torch.stack(outs, 1), torch.stack(lses)


def seen_by_rows(cu_q, cu_k):
    row_of_q = torch.searchsorted(cu_q[1:], torch.arange(cu_q[-1]), right=True)
    row_of_k = torch.searchsorted(cu_k[1:], torch.arange(cu_k[-1]), right=True)
    return row_of_q[:, None] == row_of_k


def test_a_part_matches_a_hand_computed_example():
    # Scores ln 1 and ln 3: weights 1/4 and 3/4 of values 0 and 4; the parts alone give 0 and 4.
    q, k, v = torch.ones(1, 1, 1), torch.tensor([0.0, math.log(3)]).view(2, 1, 1), torch.tensor([0.0, 4.0])
    v = v.view(2, 1, 1)

    out, lse = partial_forward(q, k, v, rows_of([1], [2], False, 1.0))

    assert out.item() == pytest.approx(3.0) and lse.item() == pytest.approx(math.log(4))
    first = partial_forward(q, k[:1], v[:1], rows_of([1], [1], False, 1.0))
    second = partial_forward(q, k[1:], v[1:], rows_of([1], [1], False, 1.0))
    out, lse = merge(*first, *second)
    assert out.item() == pytest.approx(3.0) and lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("value_dim", [8, 6])  # 6: not what the fused kernel takes
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_parts_over_any_split_of_the_keys_merge_to_attention_over_all(kv_heads, value_dim, monkeypatch):
    monkeypatch.setattr(partial_kernels, "MAX_SCORES", 60)  # plain products go by chunks of queries
    cu_q, cu_ks = bounds(*Q_LENGTHS), [bounds(*lengths) for lengths in K_LENGTHS]
    q, grad_out = randn(19, 4, 8), randn(19, 4, value_dim, seed=1)
    sizes = [int(cu_k[-1]) for cu_k in cu_ks]
    k, v = randn(sum(sizes), kv_heads, 8, seed=2), randn(sum(sizes), kv_heads, value_dim, seed=3)
    rows = [rows_of(Q_LENGTHS, lengths, False, SCALE) for lengths in K_LENGTHS]
    parts = list(zip(k.split(sizes), v.split(sizes), rows, strict=True))

    out, lse = torch.zeros(19, 4, value_dim), torch.full((4, 19), -INFINITE)
    for part_k, part_v, rows in parts:
        out, lse = merge(out, lse, *partial_forward(q, part_k, part_v, rows))
    grads = [partial_backward(grad_out, q, part_k, part_v, out, lse, rows) for part_k, part_v, rows in parts]

    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    seen = torch.cat([seen_by_rows(cu_q, cu_k) for cu_k in cu_ks], 1)
    exact_out, exact_lse = dense(*exact, seen)
    torch.testing.assert_close(out.double(), exact_out, atol=1e-6, rtol=0)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-6, rtol=0)
    ours = [
        sum(grad[0] for grad in grads),
        *(torch.cat(column) for column in list(zip(*grads, strict=True))[1:]),
    ]
    for left, right in zip(ours, torch.autograd.grad((exact_out * grad_out).sum(), exact), strict=True):
        assert (left - right).abs().max() <= 1e-6 * right.abs().max()


def test_merging_is_safe_without_keys_and_at_any_scale():
    out, lse = (
        torch.tensor([[[2.0]], [[2.0]], [[0.0]], [[0.0]]]),
        torch.tensor([[1000.0, 1.0, -INFINITE, -INFINITE]]),
    )
    new_out, new_lse = (
        torch.tensor([[[6.0]], [[0.0]], [[5.0]], [[0.0]]]),
        torch.tensor([[1000.0, -INFINITE, 7.0, -INFINITE]]),
    )

    merged, total = merge(out, lse, new_out, new_lse)

    assert merged.flatten().tolist() == [4.0, 2.0, 5.0, 0.0]
    assert total.tolist() == [[pytest.approx(1000.0 + math.log(2)), 1.0, 7.0, -INFINITE]]


def test_bfloat16_parts_are_merged_in_float32():
    # 1000 equal parts with outputs 1: their mean is 1, and the sum of their weights must not drift.
    out, lse = torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.full((1, 1), -INFINITE)
    for _ in range(1000):
        out, lse = merge(out, lse, torch.ones(1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1))

    assert out.dtype == torch.float32
    assert out.item() == pytest.approx(1.0, abs=1e-6) and lse.item() == pytest.approx(
        math.log(1000), abs=1e-5
    )


def example_calls():
    """Rows of 4, 3 and 5 tokens see themselves; tokens 4-8 see row 0 as well, tokens 7-11 row 1 as well."""
    rows, *spans = Span.of_all([(0, [4, 3, 5]), (4, [5]), (0, [4]), (7, [5]), (4, [3])], "cpu")
    return [
        AttentionCall.of(rows, rows, True),
        AttentionCall.of(*spans[:2], False),
        AttentionCall.of(*spans[2:], False),
    ]


def test_gradients_of_calls_match_finite_differences():
    inputs = [randn(12, heads, 2, seed=heads).double().requires_grad_() for heads in (2, 1, 1)]

    assert torch.autograd.gradcheck(lambda *tensors: attend_calls(*tensors, example_calls(), RULE), inputs)


def test_the_order_of_calls_does_not_matter():
    inputs = [randn(12, heads, 8, seed=heads).requires_grad_() for heads in (4, 2, 1)]
    inputs[2] = randn(12, 2, 8, seed=7).requires_grad_()
    outs = [attend_calls(*inputs, calls, RULE) for calls in itertools.permutations(example_calls())]

    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=1e-6, rtol=0)


def test_queries_without_keys_have_zero_results_and_gradients():
    inputs = [randn(6, 2, 8, seed=seed).requires_grad_() for seed in range(3)]
    # Tokens 1 and 2 see the first four.
    call = AttentionCall.of(*Span.of_all([(1, [2, 3]), (0, [4, 0])], "cpu"), False)

    out = attend_calls(*inputs, [call], RULE)
    grads = torch.autograd.grad(out.sum(), inputs)

    assert not out[[0, 3, 4, 5]].any() and out[1:3].all()
    assert not grads[0][[0, 3, 4, 5]].any() and not grads[1][4:].any() and not grads[2][4:].any()
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_adjacent_rows_of_equal_lengths_form_a_run():
    # Rows (2, 3), (2, 3), (0, 4), (2, 3), (2, 0), (2, 3): the empty ones are left out and break the run
    # where they leave a gap, among the keys or among the queries.
    found = row_runs([2, 2, 0, 2, 2, 2], [3, 3, 4, 3, 0, 3])

    assert [tuple(run) for run in found] == [(0, 0, 2, 2, 3), (4, 10, 1, 2, 3), (8, 13, 1, 2, 3)]


def test_causal_rows_need_equal_numbers_of_keys_and_queries():
    with pytest.raises(ValueError, match="as many keys as queries"):
        rows_of([2], [3], True, SCALE)


def test_gradients_of_bfloat16_rows_on_cpu_are_rounded_once():
    q, k, v, grad_out = (randn(9, 2, 32, seed=seed).bfloat16() for seed in range(4))
    rows = rows_of([4, 5], [4, 5], is_causal=True, scale=SCALE)
    out, lse = partial_forward(q, k, v, rows)

    found = partial_backward(grad_out, q, k, v, out, lse, rows)
    wide = (tensor.float() for tensor in (grad_out, q, k, v, out))
    expected = partial_backward(*wide, lse, rows)

    for grad, exact in zip(found, expected, strict=True):
        assert torch.equal(grad, exact.bfloat16())
