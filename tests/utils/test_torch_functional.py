# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.utils.torch_functional import LogitTransform, linear_log_probs

ROWS, HIDDEN, VOCABULARY = 37, 12, 50


def inputs(dtype=torch.float32, bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator, dtype=dtype).requires_grad_() if bias else None
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    return hidden, weight, offset, targets


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


def test_log_prob_and_entropy_of_two_tokens_worked_out_by_hand():
    # Logits are (log 3, 0): p = (3/4, 1/4), entropy = log 4 - 3/4 log 3.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[math.log(3.0)], [0.0]])

    log_probs, entropy = linear_log_probs(hidden, weight, torch.tensor([1]), with_entropy=True)

    assert log_probs.item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert entropy.item() == pytest.approx(math.log(4.0) - 0.75 * math.log(3.0), abs=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_bytes", [1, VOCABULARY * 4 * 8, None])
def test_equals_the_plain_log_softmax_with_gradients_at_every_chunk_size(transform, bias, chunk_bytes):
    hidden, weight, offset, targets = inputs(bias=bias)
    weights = torch.linspace(-1, 1, ROWS)

    fused = linear_log_probs(
        hidden, weight, targets, bias=offset, transform=transform, with_entropy=True, chunk_bytes=chunk_bytes
    )
    expected = plain(hidden, weight, offset, targets, transform)

    for ours, theirs in zip(fused, expected, strict=True):
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
        return tuple(
            linear_log_probs(
                hidden, weight, targets[:3], bias=bias, transform=transform, with_entropy=True, chunk_bytes=1
            )
        )

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

    log_probs, entropy = linear_log_probs(hidden, weight, torch.tensor([1]), with_entropy=True)
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
