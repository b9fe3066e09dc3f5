# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.models import fused_log_probs
from verl.models.head.logit_chunks import HeadLogits, LogitTransform

ROWS, HIDDEN, VOCABULARY = 37, 12, 50
PLAIN = LogitTransform()


def inputs(dtype=torch.float32, bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator, dtype=dtype).requires_grad_() if bias else None
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    return hidden, weight, offset, targets


def linear_log_probs(hidden, weight, targets, bias=None, transform=PLAIN, **options):
    policy = HeadLogits(hidden, weight, bias, transform)
    return fused_log_probs.linear_log_probs(policy, targets, **options)


def linear_kl(hidden, weight, other, bias=None, transform=PLAIN, **options):
    return fused_log_probs.linear_kl(HeadLogits(hidden, weight, bias, transform), other, **options)


def plain(hidden, weight, bias, targets, transform):
    """All logits, by the definitions."""
    z = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    log_p = torch.log_softmax(z / transform.temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def gradients(tensors, loss):
    return torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None])


TRANSFORMS = [
    LogitTransform(),
    LogitTransform(temperature=0.7),
    LogitTransform(scale=0.25),
    LogitTransform(softcap=3.0, temperature=1.3),
    LogitTransform(scale=2.0, softcap=3.0, temperature=0.5),
]


def test_log_prob_and_entropy_match_a_hand_computed_example():
    # Logits are (log 3, 0): p = (3/4, 1/4), entropy = log 4 - 3/4 log 3.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[math.log(3.0)], [0.0]])

    log_probs, entropy, *_ = linear_log_probs(hidden, weight, torch.tensor([1]), with_entropy=True)

    assert log_probs.item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert entropy.item() == pytest.approx(math.log(4.0) - 0.75 * math.log(3.0), abs=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_bytes", [1, VOCABULARY * 4 * 8, None])
def test_it_equals_the_plain_log_softmax_with_gradients_at_every_chunk_size(transform, bias, chunk_bytes):
    hidden, weight, offset, targets = inputs(bias=bias)
    weights = torch.linspace(-1, 1, ROWS)

    fused = linear_log_probs(
        hidden, weight, targets, bias=offset, transform=transform, with_entropy=True, chunk_bytes=chunk_bytes
    )
    expected = plain(hidden, weight, offset, targets, transform)

    for ours, theirs in zip(fused[:2], expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    both = [(pair[0] * weights).sum() + 0.3 * (pair[1] * weights.flip(0)).sum() for pair in (fused, expected)]
    for ours, theirs in zip(*(gradients((hidden, weight, offset), loss) for loss in both), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("which", [0, 1])
def test_either_result_alone_may_be_differentiated(which):
    hidden, weight, _, targets = inputs()
    transform = LogitTransform(softcap=3.0, temperature=0.8)

    fused = linear_log_probs(hidden, weight, targets, transform=transform, with_entropy=True)[which]
    expected = plain(hidden, weight, None, targets, transform)[which]

    for ours, theirs in zip(
        gradients((hidden, weight), fused.square().sum()),
        gradients((hidden, weight), expected.square().sum()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_numerical_differentiation_agrees_in_double_precision():
    hidden, weight, bias, targets = inputs(torch.float64, bias=True)
    transform = LogitTransform(scale=1.5, softcap=4.0, temperature=0.9)

    def both(hidden, weight, bias):
        result = linear_log_probs(
            hidden, weight, targets[:3], bias=bias, transform=transform, with_entropy=True, chunk_bytes=1
        )
        return result.log_probs, result.entropy

    assert torch.autograd.gradcheck(both, (hidden[:3].detach().requires_grad_(), weight, bias))


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, _, targets = inputs()

    linear_log_probs(hidden, weight.detach(), targets).log_probs.sum().backward()

    assert hidden.grad is not None
    assert weight.grad is None


def test_no_tokens_give_no_results_and_zero_gradients():
    hidden, weight, _, targets = inputs()

    result = linear_log_probs(hidden[:0], weight, targets[:0], with_entropy=True)
    (result.log_probs.sum() + result.entropy.sum()).backward()

    assert result.log_probs.shape == result.entropy.shape == (0,)
    assert weight.grad.abs().sum() == 0


def test_large_logits_stay_finite():
    hidden = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])

    log_probs, entropy, *_ = linear_log_probs(hidden, weight, torch.tensor([1]), with_entropy=True)
    (log_probs + entropy).sum().backward()

    assert log_probs.item() == -2e4
    assert entropy.item() == 0
    assert hidden.grad.isfinite().all()


def test_half_precision_products_give_float32_results_and_gradients_of_the_inputs_dtype():
    hidden, weight, _, targets = inputs()
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]

    result = linear_log_probs(*low, targets, with_entropy=True, chunk_bytes=VOCABULARY * 2 * 8)
    expected = plain(*(tensor.float() for tensor in low), None, targets, LogitTransform())

    assert result.log_probs.dtype == torch.float32
    torch.testing.assert_close(result.log_probs, expected[0], atol=0.05, rtol=0.02)
    ours, theirs = gradients(low, result.log_probs.sum()), gradients(low, expected[0].sum())
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == torch.bfloat16
        torch.testing.assert_close(left, right, atol=0.1, rtol=0.05)


def test_autocast_runs_the_products_in_its_dtype():
    hidden, weight, _, targets = inputs()

    with torch.autocast("cpu", torch.bfloat16):
        inside = linear_log_probs(hidden, weight, targets).log_probs
    outside = linear_log_probs(hidden.bfloat16(), weight.bfloat16(), targets).log_probs

    torch.testing.assert_close(inside, outside, atol=0, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    hidden, weight, _, targets = inputs()

    with pytest.raises(ValueError, match="temperature must be positive"):
        linear_log_probs(hidden, weight, targets, transform=LogitTransform(temperature=temperature))


def test_a_missing_target_is_refused():
    hidden, weight, _, targets = inputs()

    with pytest.raises(ValueError, match="one target per hidden state"):
        linear_log_probs(hidden, weight, targets[:-1])


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_sum_of_squared_probabilities_matches_a_hand_computed_example(with_entropy):
    # p = (3/4, 1/4): 9/16 + 1/16; with equal logits 1/4 + 1/4.
    hidden, weight = torch.tensor([[1.0], [0.0]]), torch.tensor([[math.log(3.0)], [0.0]])

    result = linear_log_probs(
        hidden, weight, torch.tensor([1, 0]), with_entropy=with_entropy, with_sum_squares=True
    )

    torch.testing.assert_close(result.sum_squared_probs, torch.tensor([0.625, 0.5]))
    assert (result.entropy is not None) == with_entropy


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_bytes", [1, VOCABULARY * 4 * 8, None])
def test_the_sum_of_squared_probabilities_equals_the_plain_one_and_changes_nothing_else(
    transform, chunk_bytes
):
    hidden, weight, bias, targets = inputs(bias=True)
    options = {"bias": bias, "transform": transform, "with_entropy": True, "chunk_bytes": chunk_bytes}

    without = linear_log_probs(hidden, weight, targets, **options)
    result = linear_log_probs(hidden, weight, targets, with_sum_squares=True, **options)

    p = plain_log_p(HeadLogits(hidden, weight, bias, transform)).exp()
    torch.testing.assert_close(result.sum_squared_probs, p.square().sum(-1).float(), atol=1e-7, rtol=1e-5)
    assert without.sum_squared_probs is None
    for ours, theirs in zip(result[:2], without[:2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    losses = [(found.log_probs + found.entropy).sum() for found in (result, without)]
    for ours, theirs in zip(*(gradients((hidden, weight, bias), loss) for loss in losses), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_a_gradient_through_the_sum_of_squared_probabilities_is_refused():
    hidden, weight, _, targets = inputs()
    result = linear_log_probs(hidden, weight, targets, with_sum_squares=True)

    with pytest.raises(NotImplementedError, match="`sum_squared_probs` has no gradient"):
        (result.log_probs * result.sum_squared_probs).sum().backward()


def reference(dtype=torch.float32, rows=ROWS, temperature=1.5):
    """A second model with another hidden size."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, HIDDEN + 3, generator=generator, dtype=dtype)
    weight = torch.randn(VOCABULARY, HIDDEN + 3, generator=generator, dtype=dtype)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=dtype)
    tensors = (tensor.requires_grad_() for tensor in (hidden, weight, bias))
    return HeadLogits(*tensors, LogitTransform(temperature=temperature))


def plain_log_p(head):
    """Log-probabilities of the whole vocabulary in float64, by the definitions."""
    double = [None if tensor is None else tensor.double() for tensor in head[:3]]
    transform = head.transform
    z = torch.nn.functional.linear(*double) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return torch.log_softmax(z / transform.temperature, -1)


def plain_kl(policy, other):
    log_p, log_q = plain_log_p(policy), plain_log_p(other)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def test_the_kl_matches_a_hand_computed_example():
    # p = (3/4, 1/4) and q = (1/2, 1/2): 3/4 log(3/2) + 1/4 log(1/2). d KL / dz = p (log p/q - KL).
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[math.log(3.0)], [0.0]], requires_grad=True)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)

    kl = linear_kl(hidden, weight, HeadLogits(torch.tensor([[0.0]]), weight.detach()))
    kl.sum().backward()

    assert kl.item() == pytest.approx(expected, abs=1e-6)
    assert weight.grad[:, 0].tolist() == pytest.approx(
        [0.75 * (math.log(1.5) - expected), 0.25 * (math.log(0.5) - expected)], abs=1e-6
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_bytes", [1, VOCABULARY * 8 * 8, None])
def test_the_kl_equals_the_plain_one_with_gradients_at_every_chunk_size(transform, bias, chunk_bytes):
    hidden, weight, offset, _ = inputs(bias=bias)
    other = reference()
    weights = torch.linspace(-1, 1, ROWS)

    kl = linear_kl(hidden, weight, other, bias=offset, transform=transform, chunk_bytes=chunk_bytes)
    expected = plain_kl(HeadLogits(hidden, weight, offset, transform), other)

    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, expected.float(), atol=1e-6, rtol=1e-5)
    losses = [(values * weights).sum() for values in (kl, expected)]
    for ours, theirs in zip(*(gradients((hidden, weight, offset), loss) for loss in losses), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_numerical_differentiation_of_the_kl_agrees_in_double_precision():
    hidden, weight, bias, _ = inputs(torch.float64, bias=True)
    other = HeadLogits(*(tensor.detach() for tensor in reference(torch.float64, rows=3)[:3]))
    transform = LogitTransform(scale=1.5, softcap=4.0, temperature=0.9)

    def kl(hidden, weight, bias):
        return linear_kl(hidden, weight, other, bias=bias, transform=transform, chunk_bytes=1)

    assert torch.autograd.gradcheck(kl, (hidden[:3].detach().requires_grad_(), weight, bias))


def test_the_reference_gets_no_gradient():
    hidden, weight, _, _ = inputs()
    other = reference()

    linear_kl(hidden, weight, other).sum().backward()

    assert hidden.grad is not None and weight.grad is not None
    assert all(tensor.grad is None for tensor in other[:3])


def test_the_kl_of_a_model_from_itself_is_zero_with_zero_gradients():
    hidden, weight, bias, _ = inputs(bias=True)
    transform = LogitTransform(softcap=3.0)

    kl = linear_kl(
        hidden, weight, HeadLogits(hidden, weight, bias, transform), bias=bias, transform=transform
    )

    assert kl.eq(0).all()
    for gradient in gradients((hidden, weight, bias), kl.sum()):
        assert gradient.abs().max() < 1e-5


def test_a_small_kl_of_large_logits_is_accurate():
    # Logits of up to 69 that differ by about 0.03: the KL is 5e-5 on average.
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(64, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) * 5
    other = HeadLogits(hidden, weight + 1e-2 * torch.randn(weight.shape, generator=generator))

    kl = linear_kl(hidden, weight, other)

    expected = plain_kl(HeadLogits(hidden, weight), other)
    assert kl.min() >= 0
    torch.testing.assert_close(kl, expected.float(), atol=1e-6, rtol=1e-3)


def test_far_apart_distributions_have_a_finite_kl():
    hidden, weight = torch.tensor([[1e4]], requires_grad=True), torch.tensor([[1.0], [-1.0]])

    kl = linear_kl(hidden, weight, HeadLogits(-hidden.detach(), weight))
    kl.sum().backward()

    assert kl.item() == 2e4
    assert hidden.grad.isfinite().all()


def test_half_precision_and_autocast_give_a_float32_kl():
    hidden, weight, _, _ = inputs()
    other = reference()
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    low_other = other._replace(hidden=other.hidden.bfloat16(), weight=other.weight.bfloat16())

    kl = linear_kl(*low, low_other)
    with torch.autocast("cpu", torch.bfloat16):
        inside = linear_kl(hidden, weight, other)
    expected = plain_kl(HeadLogits(*low), low_other)

    assert kl.dtype == torch.float32
    torch.testing.assert_close(inside, kl, atol=0, rtol=0)
    torch.testing.assert_close(kl, expected.float(), atol=0.1, rtol=0.05)
    for ours, theirs in zip(gradients(low, kl.sum()), gradients(low, expected.sum()), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, atol=0.2, rtol=0.1)


def test_no_tokens_give_no_kl_and_zero_gradients():
    hidden, weight, _, _ = inputs()

    kl = linear_kl(hidden[:0], weight, reference(rows=0))
    kl.sum().backward()

    assert kl.shape == (0,)
    assert weight.grad.abs().sum() == 0


def test_different_numbers_of_tokens_or_vocabularies_are_refused():
    hidden, weight, _, _ = inputs()

    with pytest.raises(ValueError, match="the same tokens and vocabulary"):
        linear_kl(hidden, weight, reference(rows=ROWS - 1))
    with pytest.raises(ValueError, match="the same tokens and vocabulary"):
        linear_kl(hidden, weight[:-1], reference())


@pytest.mark.parametrize("temperatures", [(0.0, 1.0), (1.0, -1.0)])
def test_a_temperature_of_either_model_that_is_not_positive_is_refused(temperatures):
    hidden, weight, _, _ = inputs()
    ours, theirs = temperatures

    with pytest.raises(ValueError, match="temperature must be positive"):
        linear_kl(hidden, weight, reference(temperature=theirs), transform=LogitTransform(temperature=ours))


def plain_forward_kl(policy, other):
    log_p, log_q = plain_log_p(policy), plain_log_p(other)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def test_the_forward_kl_matches_a_hand_computed_example():
    # p = (3/4, 1/4) and q = (1/2, 1/2): 1/2 log(2/3) + 1/2 log 2. d KL / dz = p - q.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[math.log(3.0)], [0.0]], requires_grad=True)

    kl = linear_kl(hidden, weight, HeadLogits(torch.tensor([[0.0]]), weight.detach()), is_forward=True)
    kl.sum().backward()

    assert kl.item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2.0), abs=1e-6)
    assert weight.grad[:, 0].tolist() == pytest.approx([0.25, -0.25], abs=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_bytes", [1, VOCABULARY * 8 * 8, None])
def test_the_forward_kl_equals_that_of_float64_with_gradients_at_every_chunk_size(
    transform, bias, chunk_bytes
):
    hidden, weight, offset, _ = inputs(bias=bias)
    other = reference()
    weights = torch.linspace(-1, 1, ROWS)
    options = {"bias": offset, "transform": transform, "chunk_bytes": chunk_bytes, "is_forward": True}

    kl = linear_kl(hidden, weight, other, **options)
    expected = plain_forward_kl(HeadLogits(hidden, weight, offset, transform), other)

    torch.testing.assert_close(kl, expected.float(), atol=1e-6, rtol=1e-5)
    losses = [(values * weights).sum() for values in (kl, expected)]
    for ours, theirs in zip(*(gradients((hidden, weight, offset), loss) for loss in losses), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert all(tensor.grad is None for tensor in other[:3])


def test_numerical_differentiation_of_the_forward_kl_agrees_in_double_precision():
    hidden, weight, bias, _ = inputs(torch.float64, bias=True)
    other = HeadLogits(*(tensor.detach() for tensor in reference(torch.float64, rows=3)[:3]))
    transform = LogitTransform(scale=1.5, softcap=4.0, temperature=0.9)

    def kl(hidden, weight, bias):
        options = {"bias": bias, "transform": transform, "chunk_bytes": 1, "is_forward": True}
        return linear_kl(hidden, weight, other, **options)

    assert torch.autograd.gradcheck(kl, (hidden[:3].detach().requires_grad_(), weight, bias))
