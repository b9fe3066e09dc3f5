# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
import torch

from tests.models.test_fused_log_probs import (
    TRANSFORMS,
    VOCABULARY,
    gradients,
    inputs,
    plain_log_p,
    reference,
)
from verl.algorithms.kl import top_kl
from verl.models.fused_log_probs import linear_kl
from verl.models.head.logit_chunks import HeadLogits
from verl.models.head.top_tokens import linear_top_log_probs, top_tokens

K = 5


def merged(log_p, ids):
    """Log-probabilities of the tokens `ids`, and of all others together, by the definition."""
    chosen = log_p.gather(1, ids)
    rest = log_p.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([chosen, rest], 1)


def test_the_top_tokens_and_their_log_probs_match_a_hand_computed_example():
    # Logits are log of (6, 3, 2, 1): p = (1/2, 1/4, 1/6, 1/12). The best two leave 1/4.
    head = HeadLogits(torch.ones(1, 1), torch.tensor([2.0, 6.0, 1.0, 3.0]).log()[:, None])

    found = top_tokens(head, 2)

    assert found.ids.tolist() == [[1, 3]]
    torch.testing.assert_close(found.log_probs.exp(), torch.tensor([[0.5, 0.25, 0.25]]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk_bytes", [1, VOCABULARY * 4 * 8, None])
def test_log_probs_of_top_tokens_equal_the_plain_ones_with_gradients(transform, bias, chunk_bytes):
    hidden, weight, offset, _ = inputs(bias=bias)
    policy = HeadLogits(hidden, weight, offset, transform)
    teacher = top_tokens(reference(), K, chunk_bytes)
    weights = torch.linspace(-1, 1, len(hidden) * (K + 1)).view(-1, K + 1)

    found = linear_top_log_probs(policy, teacher.ids, chunk_bytes)
    expected = merged(plain_log_p(policy), teacher.ids)

    torch.testing.assert_close(teacher.log_probs, merged(plain_log_p(reference()), teacher.ids).float())
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)
    losses = [(values * weights).sum() for values in (found, expected)]
    for ours, theirs in zip(*(gradients((hidden, weight, offset), loss) for loss in losses), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_forward", [False, True])
def test_the_kl_of_top_tokens_is_not_negative_grows_with_k_and_ends_at_the_exact_one(is_forward):
    hidden, weight, _, _ = inputs()
    policy, teacher = HeadLogits(hidden, weight), reference()
    exact = linear_kl(policy, teacher, is_forward=is_forward)

    found = []
    for k in (1, 4, 16, VOCABULARY - 1):
        top = top_tokens(teacher, k)
        found.append(top_kl(linear_top_log_probs(policy, top.ids), top.log_probs, is_forward=is_forward))

    assert found[0].min() >= 0
    for fewer, more in itertools.pairwise(found):
        assert (more - fewer).min() > -1e-5
    torch.testing.assert_close(found[-1], exact, atol=1e-5, rtol=1e-5)


def test_numerical_differentiation_agrees_in_double_precision():
    hidden, weight, bias, _ = inputs(torch.float64, bias=True)
    top = top_tokens(reference(torch.float64), K)

    def divergences(hidden, weight, bias):
        log_probs = linear_top_log_probs(HeadLogits(hidden, weight, bias, TRANSFORMS[4]), top.ids[:3], 1)
        return tuple(top_kl(log_probs, top.log_probs[:3], is_forward=forward) for forward in (False, True))

    assert torch.autograd.gradcheck(divergences, (hidden[:3].detach().requires_grad_(), weight, bias))


def test_a_student_that_is_far_from_its_teacher_has_finite_gradients():
    hidden = torch.tensor([[1e3]], requires_grad=True)
    policy = HeadLogits(hidden, torch.tensor([[1.0], [-1.0], [0.5], [0.0]]))
    top = top_tokens(HeadLogits(torch.tensor([[-20.0]]), policy.weight), 2)

    for is_forward in (False, True):
        kl = top_kl(linear_top_log_probs(policy, top.ids), top.log_probs, is_forward=is_forward)
        kl.sum().backward()

        assert kl.isfinite().all() and hidden.grad.isfinite().all()


@pytest.mark.parametrize("k", [0, VOCABULARY])
def test_a_number_of_tokens_that_leaves_no_others_is_refused(k):
    with pytest.raises(ValueError, match=f"k must be from 1 to {VOCABULARY - 1}"):
        top_tokens(reference(), k)
