# SPDX-License-Identifier: Apache-2.0
"""The head's Triton kernels against torch operations and float64, under Triton's interpreter on CPU.

`test_head_softmax.py` runs this file in a process of its own: the interpreter is chosen by the environment
before triton is first imported.

    TRITON_INTERPRET=1 python -m pytest tests/models/head_kernel_laws.py
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.models import fused_log_probs
from verl.models.deferred_logits import DeferredLogits, DeferringHead
from verl.models.fused_log_probs import linear_kl, linear_log_probs
from verl.models.head import triton_softmax
from verl.models.head.eager_softmax import (
    EagerSoftmax,
    HeadProducts,
    KLGradients,
    KLStatistics,
    LogProbGradients,
    LogProbStatistics,
    rows_of,
)
from verl.models.head.logit_chunks import HeadLogits, LogitTransform
from verl.models.head.triton_softmax import TritonSoftmax

BLOCK = 16
EAGER, KERNELS = EagerSoftmax(), TritonSoftmax()
TRANSFORMS = [
    LogitTransform(),
    LogitTransform(temperature=0.7),
    LogitTransform(scale=0.25),
    LogitTransform(softcap=3.0, temperature=1.3),
    LogitTransform(scale=2.0, softcap=30.0, temperature=0.5),
]
# Products, gradients and their largest error; a GPU has float32 products and gradients of the weight's dtype.
DTYPES = [
    (torch.float32, torch.float32, 3e-6),
    (torch.float32, torch.bfloat16, 2**-7),
    (torch.float32, torch.float16, 2**-10),
    (torch.bfloat16, torch.bfloat16, 2**-7),
    (torch.float16, torch.float16, 2**-10),
    (torch.float64, torch.float64, 1e-13),
]
OPTIONS = list(itertools.product([False, True], [False, True]))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(triton_softmax, "BLOCK", BLOCK)


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def products(
    rows, vocabulary, dtype=torch.float32, bias=None, transform=TRANSFORMS[0], *, seed=0, spread=3.0
):
    values = (spread * numbers(rows, vocabulary, seed=seed)).to(dtype)
    offset = None if bias is None else numbers(vocabulary, seed=seed + 1, dtype=bias)
    return HeadProducts(values, offset, transform)


def targets_of(rows, vocabulary):
    """The first and the last token, then the others, some of them repeated."""
    return torch.tensor([0, vocabulary - 1, vocabulary // 2, vocabulary // 2, 1 % vocabulary][:rows])


def log_p_of(head, x):
    """Log-probabilities in float64 by the definitions; `x` is the float64 leaf of the products."""
    scale, softcap, temperature = head.transform
    z = (x if head.bias is None else x + head.bias.double()) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return torch.log_softmax(z / temperature, -1)


def times(p, values):
    return torch.where(p == 0, 0.0, p * values.where(p != 0, 0.0))


def log_probs_by(softmax, head, targets, with_entropy=True, with_sum_squares=True):
    dtype = torch.promote_types(head.values.dtype, torch.float32)
    wanted = (True, True, with_entropy, with_sum_squares)
    empty = torch.full((4, len(targets)), math.nan, dtype=dtype, device=targets.device)
    results = LogProbStatistics(
        *(column if want else None for column, want in zip(empty, wanted, strict=True))
    )
    softmax.log_probs(head, targets, results)
    return results


def gradient_by(softmax, head, targets, dtype, grads, entropy, grad_bias=None):
    results = log_probs_by(EAGER, head, targets)
    given = LogProbGradients(
        results.lse, grads[0], results.entropy if entropy else None, grads[1] if entropy else None
    )
    copied = head._replace(values=head.values.clone())  # the gradient overwrites them
    return softmax.log_prob_gradient(copied, targets, given, dtype, grad_bias)


def assert_close(found, expected, tolerance):
    """Assert that errors are within `tolerance` of the largest value, or of one."""
    found, expected = found.cpu(), expected.cpu()
    assert found.shape == expected.shape
    assert torch.equal(found.isinf(), expected.isinf())
    finite = expected.isfinite()
    limit = tolerance * max(1.0, expected[finite].abs().max().item() if finite.any() else 0.0)
    torch.testing.assert_close(found[finite].double(), expected[finite].double(), atol=limit, rtol=0)


def pairwise(dtypes, biases):
    """Every two of a dtype, a bias and a transform, not every three."""
    return [
        (dtype, biases[(row + column) % len(biases)], transform)
        for row, dtype in enumerate(dtypes)
        for column, transform in enumerate(TRANSFORMS)
    ]


@pytest.mark.parametrize(
    ("dtype", "bias", "transform"),
    pairwise([torch.float32, torch.bfloat16, torch.float16], [None, torch.float32, torch.bfloat16]),
)
def test_statistics_equal_torchs_and_those_of_float64(dtype, bias, transform):
    head, targets = products(5, 50, dtype, bias, transform), targets_of(5, 50)

    for with_entropy, with_sum_squares in OPTIONS:
        found = log_probs_by(KERNELS, head, targets, with_entropy, with_sum_squares)
        expected = log_probs_by(EAGER, head, targets, with_entropy, with_sum_squares)
        log_p = log_p_of(head, head.values.double())
        assert found.log_probs.dtype == torch.float32
        assert (found.entropy is None, found.sum_squares is None) == (not with_entropy, not with_sum_squares)
        assert_close(found.log_probs, log_p.gather(1, targets[:, None])[:, 0], 3e-6)
        for ours, theirs in zip(found, expected, strict=True):
            if ours is not None:
                assert_close(ours, theirs, 3e-6)
        if with_entropy:
            assert_close(found.entropy, -(log_p.exp() * log_p).sum(1), 3e-6)
        if with_sum_squares:
            assert_close(found.sum_squares, (2 * log_p).exp().sum(1), 3e-6)


@pytest.mark.parametrize(("dtypes", "bias", "transform"), pairwise(DTYPES, [None, torch.float32]))
def test_gradients_equal_torchs_and_those_of_float64(dtypes, bias, transform):
    dtype, wanted, tolerance = dtypes
    head, targets = products(5, 50, dtype, bias, transform), targets_of(5, 50)
    accurate = torch.promote_types(dtype, torch.float32)
    grads = numbers(2, 5, seed=7, dtype=accurate)

    for entropy in (False, True):
        found = gradient_by(KERNELS, head, targets, wanted, grads, entropy)
        leaf = head.values.double().clone().requires_grad_()
        log_p = log_p_of(head, leaf)
        loss = (log_p.gather(1, targets[:, None])[:, 0] * grads[0]).sum()
        if entropy:
            loss = loss - ((log_p.exp() * log_p).sum(1) * grads[1]).sum()
        loss.backward()
        assert found.dtype == wanted
        assert_close(found, leaf.grad, tolerance)
        assert_close(found, gradient_by(EAGER, head, targets, wanted, grads, entropy), tolerance)


@pytest.mark.parametrize(("dtype", "wanted", "tolerance"), DTYPES)
def test_the_bias_gets_the_sum_over_tokens_added_to_what_it_has(dtype, wanted, tolerance):
    head, targets = products(5, 50, dtype, torch.float32, TRANSFORMS[3]), targets_of(5, 50)
    accurate = torch.promote_types(dtype, torch.float32)
    grads = numbers(2, 5, seed=7, dtype=accurate)
    sums = [torch.ones(50, dtype=accurate) for _ in range(2)]

    found, expected = (
        gradient_by(softmax, head, targets, wanted, grads, True, grad_bias)
        for softmax, grad_bias in zip((KERNELS, EAGER), sums, strict=True)
    )

    assert_close(found, expected, tolerance)
    # Products of the GPU are float32 or more, and so are the gradients that are summed.
    assert_close(*sums, 3e-6 if dtype.itemsize >= 4 else 5 * tolerance)


@pytest.mark.parametrize("vocabulary", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("rows", [1, 4])
def test_any_vocabulary_and_number_of_tokens_gives_the_same(rows, vocabulary):
    head, targets = products(rows, vocabulary), targets_of(rows, vocabulary)
    grads = numbers(2, rows, seed=7)

    for ours, theirs in zip(*(log_probs_by(s, head, targets) for s in (KERNELS, EAGER)), strict=True):
        assert_close(ours, theirs, 3e-6)
    for wanted, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2**-7)):
        found, expected = (gradient_by(s, head, targets, wanted, grads, True) for s in (KERNELS, EAGER))
        assert_close(found, expected, tolerance)


@pytest.mark.parametrize("largest", [1e4, -1e4, 3e4])
def test_large_logits_in_any_block_stay_finite(largest):
    head, targets = products(4, 50), torch.tensor([0, 20, 49, 3])
    head.values[range(4), [0, 20, 49, 49]] = largest
    grads = numbers(2, 4, seed=7)

    found, expected = (log_probs_by(s, head, targets) for s in (KERNELS, EAGER))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        assert_close(ours, theirs, 3e-6)
    gradients = [gradient_by(s, head, targets, torch.float32, grads, True) for s in (KERNELS, EAGER)]
    assert gradients[0].isfinite().all()
    assert_close(*gradients, 2e-6)


def test_tokens_with_a_logit_of_minus_infinity_have_no_probability_and_no_gradient():
    head, targets = products(3, 50, bias=torch.float32), torch.tensor([0, 30, 49])
    head.bias[1:20] = -math.inf  # more than a block
    grads = numbers(2, 3, seed=7)

    found = log_probs_by(KERNELS, head, targets)
    gradient = gradient_by(KERNELS, head, targets, torch.float32, grads, False)
    log_p = log_p_of(head, head.values.double())

    assert_close(found.log_probs, log_p.gather(1, targets[:, None])[:, 0], 3e-6)
    assert_close(found.entropy, -times(log_p.exp(), log_p).sum(1), 3e-6)
    assert_close(found.sum_squares, (2 * log_p).exp().sum(1), 3e-6)
    assert_close(gradient, gradient_by(EAGER, head, targets, torch.float32, grads, False), 2e-6)
    given = LogProbGradients(found.lse, grads[0], found.entropy, grads[1])
    with_entropy = KERNELS.log_prob_gradient(head, targets, given, torch.float32, None)
    assert with_entropy.isfinite().all()
    assert with_entropy[:, 1:20].eq(0).all()


def test_a_target_without_probability_has_a_log_prob_of_minus_infinity():
    head = products(1, 50, bias=torch.float32)
    head.bias[7] = -math.inf

    assert log_probs_by(KERNELS, head, torch.tensor([7])).log_probs.item() == -math.inf


def test_a_target_of_another_rank_gives_no_number_by_torch_either():
    assert math.isnan(log_probs_by(EAGER, products(1, 50), torch.tensor([-1])).log_probs.item())


@pytest.mark.parametrize("target", [-1, 50])
def test_a_target_outside_the_vocabulary_gives_no_number(target):
    assert log_probs_by(KERNELS, products(1, 50), torch.tensor([target])).log_probs.isnan().all()


def test_a_logit_that_is_no_number_is_not_hidden():
    head = products(2, 50)
    head.values[1, 30] = math.nan

    found = log_probs_by(KERNELS, head, torch.tensor([0, 0]))

    for column in found:
        assert column.isfinite().tolist() == [True, False]


def test_the_result_for_a_token_depends_on_no_other_token_and_on_no_other_run():
    head, targets = products(5, 50, bias=torch.float32, transform=TRANSFORMS[4]), targets_of(5, 50)
    grads = numbers(2, 5, seed=7)

    whole, again = (log_probs_by(KERNELS, head, targets) for _ in range(2))
    gradient = gradient_by(KERNELS, head, targets, torch.bfloat16, grads, True)

    for rows in (slice(0, 2), slice(2, 5)):
        part = log_probs_by(KERNELS, head._replace(values=head.values[rows]), targets[rows])
        for ours, theirs, repeated in zip(part, rows_of(whole, rows), rows_of(again, rows), strict=True):
            assert torch.equal(ours, theirs) and torch.equal(ours, repeated)
        given = head._replace(values=head.values[rows])
        of_part = gradient_by(KERNELS, given, targets[rows], torch.bfloat16, grads[:, rows], True)
        assert torch.equal(of_part, gradient[rows])


def test_gradients_overwrite_the_products_and_leave_other_tensors_alone():
    head, targets = products(5, 51, bias=torch.float32), targets_of(5, 51)
    other = products(5, 51, seed=3)
    kept = [tensor.clone() for tensor in (head.bias, targets, other.values)]
    results = log_probs_by(KERNELS, head, targets)
    grads = numbers(2, 5, seed=7)

    given = LogProbGradients(results.lse, grads[0], results.entropy, grads[1])
    gradient = KERNELS.log_prob_gradient(head, targets, given, torch.bfloat16, None)

    assert gradient.untyped_storage().data_ptr() == head.values.untyped_storage().data_ptr()
    assert gradient.stride() == (2 * 51, 1)
    for ours, theirs in zip((head.bias, targets, other.values), kept, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_that_are_one_expanded_number_are_read_as_such():
    head, targets = products(5, 50), targets_of(5, 50)
    expanded = torch.tensor([[0.5], [-2.0]]).expand(2, 5)

    found = gradient_by(KERNELS, head, targets, torch.float32, expanded, True)

    assert_close(found, gradient_by(EAGER, head, targets, torch.float32, expanded, True), 2e-6)


def kl_by(softmax, policy, reference, with_ref_lse=False):
    dtype = torch.promote_types(policy.values.dtype, torch.float32)
    shape, device = (4 if with_ref_lse else 3, len(policy.values)), policy.values.device
    results = KLStatistics(*torch.full(shape, math.nan, dtype=dtype, device=device))
    softmax.kl(policy, reference, results)
    return results


def kl_gradient_by(softmax, policy, reference, dtype, grad, grad_bias=None):
    results = kl_by(EAGER, policy, reference)
    copied = policy._replace(values=policy.values.clone())
    given = KLGradients(results.lse, grad, mean_gap=results.mean_gap)
    return softmax.kl_gradient(copied, reference, given, dtype, grad_bias)


def pairs(rows=5, vocabulary=50, dtype=torch.float32, transform=TRANSFORMS[0]):
    other = products(rows, vocabulary, dtype, torch.float32, LogitTransform(temperature=1.5), seed=11)
    return products(rows, vocabulary, dtype, torch.float32, transform), other


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("dtype", "wanted", "tolerance"), DTYPES)
def test_the_kl_and_its_gradient_equal_torchs_and_those_of_float64(dtype, wanted, tolerance, transform):
    policy, reference = pairs(dtype=dtype, transform=transform)
    accurate = torch.promote_types(dtype, torch.float32)
    grad = numbers(5, seed=7, dtype=accurate)

    found = kl_by(KERNELS, policy, reference)
    gradient = kl_gradient_by(KERNELS, policy, reference, wanted, grad)
    leaf = policy.values.double().clone().requires_grad_()
    log_p, log_q = log_p_of(policy, leaf), log_p_of(reference, reference.values.double())
    kl = (log_p.exp() * (log_p - log_q)).sum(1)
    (kl * grad).sum().backward()

    assert_close(found.kl, kl.detach(), 3e-6)
    for ours, theirs in zip(found[:3], kl_by(EAGER, policy, reference)[:3], strict=True):
        assert_close(ours, theirs, 3e-6)
    assert gradient.dtype == wanted
    assert_close(gradient, leaf.grad, max(tolerance, 1e-5) if accurate != torch.float64 else 1e-12)
    assert_close(gradient, kl_gradient_by(EAGER, policy, reference, wanted, grad), max(tolerance, 1e-5))


def forward_gradient_by(softmax, policy, reference, dtype, grad, grad_bias=None):
    results = kl_by(EAGER, policy, reference, with_ref_lse=True)
    copied = policy._replace(values=policy.values.clone())
    given = KLGradients(results.lse, grad, ref_lse=results.ref_lse)
    return softmax.kl_gradient(copied, reference, given, dtype, grad_bias)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("dtype", "wanted", "tolerance"), DTYPES)
def test_the_forward_kls_gradient_equals_torchs_and_that_of_float64(dtype, wanted, tolerance, transform):
    policy, reference = pairs(dtype=dtype, transform=transform)
    accurate = torch.promote_types(dtype, torch.float32)
    grad = numbers(5, seed=7, dtype=accurate)

    found = kl_by(KERNELS, reference, policy, with_ref_lse=True)
    gradient = forward_gradient_by(KERNELS, policy, reference, wanted, grad)
    leaf = policy.values.double().clone().requires_grad_()
    log_p, log_q = log_p_of(policy, leaf), log_p_of(reference, reference.values.double())
    kl = (log_q.exp() * (log_q - log_p)).sum(1)
    (kl * grad).sum().backward()

    assert_close(found.kl, kl.detach(), 3e-6)
    for ours, theirs in zip(found, kl_by(EAGER, reference, policy, with_ref_lse=True), strict=True):
        assert_close(ours, theirs, 3e-6)
    assert gradient.dtype == wanted
    assert_close(gradient, leaf.grad, max(tolerance, 1e-5) if accurate != torch.float64 else 1e-12)
    assert_close(gradient, forward_gradient_by(EAGER, policy, reference, wanted, grad), max(tolerance, 1e-5))


@pytest.mark.parametrize("vocabulary", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_the_kl_of_any_vocabulary_is_the_same(vocabulary):
    policy, reference = pairs(2, vocabulary)
    grad = numbers(2, seed=7)

    assert_close(kl_by(KERNELS, policy, reference).kl, kl_by(EAGER, policy, reference).kl, 3e-6)
    gradients = [kl_gradient_by(s, policy, reference, torch.float32, grad) for s in (KERNELS, EAGER)]
    assert_close(*gradients, 3e-6)
    gradients = [forward_gradient_by(s, policy, reference, torch.float32, grad) for s in (KERNELS, EAGER)]
    assert_close(*gradients, 3e-6)


def test_the_kl_of_a_model_from_itself_is_exactly_zero_with_zero_gradients():
    policy = products(5, 50, bias=torch.float32, transform=TRANSFORMS[4])

    results = kl_by(KERNELS, policy, policy._replace(values=policy.values.clone()))

    assert results.kl.eq(0).all() and results.mean_gap.eq(0).all()
    other = policy._replace(values=policy.values.clone())
    assert kl_gradient_by(KERNELS, policy, other, torch.float32, torch.ones(5)).eq(0).all()


def test_a_small_kl_of_large_logits_is_accurate():
    policy = products(5, 50, spread=25.0)
    reference = policy._replace(values=policy.values + 0.03 * numbers(5, 50, seed=5))

    found = kl_by(KERNELS, policy, reference).kl

    log_p, log_q = (log_p_of(head, head.values.double()) for head in (policy, reference))
    torch.testing.assert_close(found.double(), (log_p.exp() * (log_p - log_q)).sum(1), atol=1e-6, rtol=1e-3)


def test_far_apart_distributions_have_a_finite_kl():
    policy = HeadProducts(torch.tensor([[1e4, -1e4, 0.0]]), None, LogitTransform())
    reference = policy._replace(values=-policy.values)

    assert kl_by(KERNELS, policy, reference).kl.item() == 2e4
    gradient = kl_gradient_by(KERNELS, policy, reference, torch.float32, torch.ones(1))
    assert gradient.isfinite().all()


def test_tokens_that_neither_model_allows_leave_the_kl_of_the_others():
    policy, reference = pairs(3)
    expected = [
        head._replace(values=head.values[:, 20:], bias=head.bias[20:]) for head in (policy, reference)
    ]
    policy.bias[:20] = reference.bias[:20] = -math.inf

    found = kl_by(KERNELS, policy, reference)
    given = KLGradients(found.lse, torch.ones(3), mean_gap=found.mean_gap)
    values = policy.values.clone()
    gradient = KERNELS.kl_gradient(policy._replace(values=values), reference, given, torch.float32, None)

    assert_close(found.kl, kl_by(EAGER, *expected).kl, 3e-6)
    assert gradient[:, :20].eq(0).all()
    assert_close(gradient[:, 20:], kl_gradient_by(EAGER, *expected, torch.float32, torch.ones(3)), 3e-6)


def test_the_kls_bias_gets_the_sum_over_tokens():
    policy, reference = pairs()
    sums = torch.ones(50), torch.ones(50)

    for softmax, grad_bias in zip((KERNELS, EAGER), sums, strict=True):
        kl_gradient_by(softmax, policy, reference, torch.bfloat16, numbers(5, seed=7), grad_bias)

    assert_close(*sums, 3e-6)


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 40), st.sampled_from([1, 2, 8, 64]))
POSITIVE = st.floats(0.1, 4.0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=SHAPES,
    transform=st.builds(LogitTransform, POSITIVE, st.none() | st.floats(0.5, 50.0), POSITIVE),
    spread=st.sampled_from([0.0, 0.1, 3.0, 100.0, 1e4]),
    bias=st.sampled_from([None, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_any_shape_transform_and_size_of_logits_gives_what_float64_gives(
    shape, transform, spread, bias, seed
):
    rows, vocabulary, triton_softmax.BLOCK = shape  # the fixture puts it back
    options = {"seed": seed, "spread": spread}
    policy = products(rows, vocabulary, torch.float32, bias, transform, **options)
    reference = products(rows, vocabulary, torch.float32, bias, transform, **options | {"seed": seed + 2})
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))
    grads = numbers(2, rows, seed=seed)

    found = log_probs_by(KERNELS, policy, targets)
    log_p, log_q = (log_p_of(head, head.values.double()) for head in (policy, reference))
    # A logit is rounded to 24 bits of its own size.
    scale, softcap, temperature = transform
    logits = (spread + 1) * 4 * scale / temperature
    if softcap is not None:
        logits = min(logits, softcap / temperature)
    limit = 1e-6 * (1 + logits)

    for ours, theirs in (
        (found.log_probs, log_p.gather(1, targets[:, None])[:, 0]),
        (found.entropy, -(log_p.exp() * log_p).sum(1)),
        (found.sum_squares, (2 * log_p).exp().sum(1)),
        (kl_by(KERNELS, policy, reference).kl, (log_p.exp() * (log_p - log_q)).sum(1)),
    ):
        torch.testing.assert_close(ours.double(), theirs, atol=limit, rtol=1e-5)
    gradients = [gradient_by(s, policy, targets, torch.float32, grads, True) for s in (KERNELS, EAGER)]
    assert_close(*gradients, limit * (1 + scale / temperature) * (1 + logits))


def whole_results(monkeypatch, softmax, dtype=torch.float32, rows=5, chunk_bytes=None, bias=True):
    """Log-probs, entropy, KL divergence and all gradients from hidden states."""
    monkeypatch.setattr(fused_log_probs, "softmax_for", lambda device: softmax)
    hidden, weight = (numbers(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(rows, 12), (50, 12)]))
    leaves = [hidden, weight, *([numbers(50, seed=2, dtype=dtype)] if bias else [])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    policy = HeadLogits(*leaves, transform=LogitTransform(0.5, 3.0, 0.8)) if bias else HeadLogits(*leaves)
    reference = HeadLogits(1.2 * hidden.detach(), weight.detach())
    targets = targets_of(rows, 50)
    options = {"with_entropy": True, "with_sum_squares": True, "chunk_bytes": chunk_bytes}
    result = linear_log_probs(policy, targets, **options)
    kl = linear_kl(policy, reference, chunk_bytes=chunk_bytes)
    loss = (result.log_probs - 0.3 * result.entropy.square() + kl * torch.linspace(-1, 1, rows)).sum()
    return [*(column.detach() for column in (*result[:3], kl)), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("chunk_bytes", [1, 50 * 4 * 3, None])
def test_a_loss_and_its_gradients_are_the_same_at_every_chunk_size(monkeypatch, chunk_bytes, rows, bias):
    options = {"rows": rows, "chunk_bytes": chunk_bytes, "bias": bias}
    found, expected = (whole_results(monkeypatch, softmax, **options) for softmax in (KERNELS, EAGER))

    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, 5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_what_torch_gives_up_to_its_rounding(monkeypatch, dtype):
    found, expected = (whole_results(monkeypatch, softmax, dtype) for softmax in (KERNELS, EAGER))

    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, 3e-6 if ours.dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


def test_autocast_gives_what_torch_gives_up_to_its_rounding(monkeypatch):
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (whole_results(monkeypatch, softmax) for softmax in (KERNELS, EAGER))

    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours, theirs, 4 * torch.finfo(torch.bfloat16).eps)


def test_numerical_differentiation_agrees_in_double_precision(monkeypatch):
    monkeypatch.setattr(fused_log_probs, "softmax_for", lambda device: KERNELS)
    leaves = [
        numbers(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate([(2, 3), (18, 3), (18,)])
    ]
    reference = HeadLogits(leaves[0] * 1.3, leaves[1] * 0.8)
    transform = LogitTransform(scale=1.5, softcap=4.0, temperature=0.9)

    def results(hidden, weight, bias):
        policy = HeadLogits(hidden, weight, bias, transform)
        result = linear_log_probs(policy, torch.tensor([0, 17]), with_entropy=True, chunk_bytes=1)
        return result.log_probs, result.entropy, linear_kl(policy, reference, chunk_bytes=1)

    # One random direction of all 78 inputs: each evaluation of an interpreted kernel takes long.
    assert torch.autograd.gradcheck(results, [leaf.requires_grad_() for leaf in leaves], fast_mode=True)


def test_a_models_head_reads_the_same_through_the_kernels(monkeypatch):
    head = DeferringHead(12, 50, bias=False)
    hidden = numbers(1, 6, 12)
    rows, targets = torch.tensor([0, 2, 4]), torch.tensor([3, 49, 0])
    results = []
    for softmax in (KERNELS, EAGER):
        monkeypatch.setattr(fused_log_probs, "softmax_for", lambda device, softmax=softmax: softmax)
        logits = 30.0 * torch.tanh(DeferredLogits(hidden, head) / 30.0)
        results.append(logits.log_probs(targets, rows, 0.9, with_entropy=True))

    assert_close(results[0].log_probs, results[1].log_probs, 5e-6)
    assert_close(results[0].entropy, results[1].entropy, 5e-6)


@pytest.mark.parametrize("softmax", [EAGER, KERNELS], ids=["eager", "kernels"])
def test_a_target_of_minus_one_leaves_out_its_own_part_of_the_gradient(softmax):
    # tokens of other ranks, where the vocabulary is divided over several
    head, targets = products(3, 40), targets_of(3, 40)
    grads = numbers(2, 3, seed=5)

    own = gradient_by(softmax, head, targets, torch.float32, grads, True)
    elsewhere = gradient_by(softmax, head, torch.full_like(targets, -1), torch.float32, grads, True)

    one_hot = torch.nn.functional.one_hot(targets, 40)
    torch.testing.assert_close(own - elsewhere, one_hot * grads[0][:, None], atol=1e-6, rtol=0)
