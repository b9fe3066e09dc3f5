# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, entropy and KL divergence from hidden states, without holding the full logits.

Logits are the largest tensor of a training step. They are computed for a chunk of tokens at a time, in the
forward and again in the backward pass, with a few numbers saved per token.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.distributed.device import has_kernels
from verl.models.head.eager_softmax import (
    EagerSoftmax,
    KLGradients,
    KLStatistics,
    LogProbGradients,
    LogProbStatistics,
    rows_of,
)
from verl.models.head.logit_chunks import (
    HeadLogits,
    HeadProducts,
    LogitTransform,
    autocast_head,
    chunk_rows,
    chunks,
    head_gradients,
)
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


class TokenLogProbs(NamedTuple):
    """Float32 results, one number per token; None if not requested."""

    log_probs: Tensor  # of the given tokens
    entropy: Tensor | None = None  # of the distribution over the vocabulary, nats
    sum_squared_probs: Tensor | None = None  # sum over the vocabulary of p**2, in (0, 1]; has no gradient
    kl: Tensor | None = None  # KL(policy || reference) over the vocabulary, nats
    divergence: Tensor | None = None  # from a teacher, nats


def linear_log_probs(
    policy: HeadLogits,  # of N tokens; N may be zero
    targets: Tensor,  # (N,) int64
    *,
    with_entropy: bool = False,
    with_sum_squares: bool = False,
    chunk_bytes: int | None = None,  # bytes of logits held at once; None is the device's default
) -> TokenLogProbs:
    """Compute log-probabilities of targets under `p = softmax(transform(hidden @ weight.T + bias))`.

        z = transform(hidden @ weight.T + bias);  log_prob = z[target] - logsumexp(z)
        entropy = logsumexp(z) - p . z;  sum_squared_probs = p . p

    Matrix products run in the dtype of `hidden` and `weight`, or in autocast's; the rest is float32.
    Gradients of log-probabilities and entropy reach `hidden`, `weight` and `bias`; `sum_squared_probs` has
    none.
    """
    if targets.shape != policy.hidden.shape[:1]:
        shapes = f"targets {tuple(targets.shape)}, hidden {tuple(policy.hidden.shape)}"
        raise ValueError(f"one target per hidden state: {shapes}")
    policy = autocast_head(policy)
    rows = chunk_rows([policy], chunk_bytes)
    targets = targets if policy.part is None else policy.part.own(targets)
    return TokenLogProbs(*_LinearLogProbs.apply(*policy, targets, with_entropy, with_sum_squares, rows))


def linear_kl(
    policy: HeadLogits,  # of N tokens; N may be zero
    reference: HeadLogits,  # same tokens and vocabulary; must stay unchanged until the backward pass
    chunk_bytes: int | None = None,  # bytes of both models' logits held at once
    *,
    is_forward: bool = False,  # the other direction, KL(reference || policy)
) -> Tensor:
    """Compute the KL divergence of a policy's distribution from a reference's, for each token.

        p = softmax(transform(hidden @ weight.T + bias));  q likewise from `reference`
        KL(p || q) = sum_v p_v (log p_v - log q_v);    d KL / dz_v = p_v (log p_v - log q_v - KL)
        KL(q || p) = sum_v q_v (log q_v - log p_v);    d KL / dz_v = p_v - q_v

    Returns (N,) float32 nats, never negative. Gradients do not reach the reference.
    """
    reference = reference if policy.part is None else policy.part.cut(reference)
    (hidden, weight, *_), (ref_hidden, ref_weight, *_) = policy, reference
    if len(hidden) != len(ref_hidden) or len(weight) != len(ref_weight):
        raise ValueError(
            f"policy and reference need the same tokens and vocabulary: hidden {tuple(hidden.shape)} and"
            f" {tuple(ref_hidden.shape)}, weight {tuple(weight.shape)} and {tuple(ref_weight.shape)}"
        )
    policy = autocast_head(policy)
    with torch.no_grad():
        reference = autocast_head(reference)
    rows = chunk_rows([policy, reference], chunk_bytes)
    return _LinearKL.apply(*policy, reference, is_forward, rows)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        part: Any,
        targets: Tensor,  # in the part; -1 for others
        with_entropy: bool,
        with_sum_squares: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=accurate)
        lse = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        sum_squares = torch.empty_like(log_probs) if with_sum_squares else None
        results = LogProbStatistics(log_probs, lse, entropy, sum_squares)
        softmax = softmax_for(hidden.device.type)
        for chunk, (products,) in chunks([HeadLogits(hidden, weight, bias, transform)], rows):
            softmax.log_probs(products, targets[chunk], rows_of(results, chunk))
        if part is not None:
            part.join_log_probs(results, targets)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.transform, ctx.rows = transform, rows
        ctx.set_materialize_grads(False)
        return log_probs, entropy, sum_squares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, grad_sum_squares: Tensor | None
    ) -> tuple:
        if grad_sum_squares is not None:
            raise NotImplementedError("`sum_squared_probs` has no gradient: detach it before use in a loss")
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 9
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(lse)
        given = LogProbGradients(lse, grad_log_probs, entropy, grad_entropy)
        softmax = softmax_for(hidden.device.type)

        def chunk_grad(chunk: slice, products: Sequence[HeadProducts], grad_bias: Tensor | None) -> Tensor:
            part = rows_of(given, chunk)
            return softmax.log_prob_gradient(products[0], targets[chunk], part, hidden.dtype, grad_bias)

        heads = [HeadLogits(hidden, weight, bias, ctx.transform)]
        return *head_gradients(ctx, heads, lse.dtype, chunk_grad), *(None,) * 6


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        part: Any,
        reference: HeadLogits,
        is_forward: bool,
        rows: int,
    ) -> Tensor:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        kl, lse, ref_lse, mean_gap = (hidden.new_empty(len(hidden), dtype=accurate) for _ in range(4))
        results = KLStatistics(kl, lse, mean_gap, None if part is None else ref_lse)
        if is_forward:  # the two models change places
            results = KLStatistics(kl, ref_lse, mean_gap, lse)
        softmax = softmax_for(hidden.device.type)
        for chunk, (p, q) in chunks([HeadLogits(hidden, weight, bias, transform), reference], rows):
            softmax.kl(*((q, p) if is_forward else (p, q)), rows_of(results, chunk))
        if part is not None:
            part.join_kl(results)
        needed = (None, ref_lse) if is_forward else (mean_gap, None)
        ctx.save_for_backward(hidden, weight, bias, *reference[:3], lse, *needed)
        ctx.transforms, ctx.rows = (transform, reference.transform), rows
        return kl.clamp_(min=0)  # below zero only by rounding

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple:
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, lse, mean_gap, ref_lse = ctx.saved_tensors
        policy = HeadLogits(hidden, weight, bias, ctx.transforms[0])
        reference = HeadLogits(ref_hidden, ref_weight, ref_bias, ctx.transforms[1])
        given = KLGradients(lse, grad_kl, mean_gap, ref_lse)
        softmax = softmax_for(hidden.device.type)

        def chunk_grad(chunk: slice, products: Sequence[HeadProducts], grad_bias: Tensor | None) -> Tensor:
            p, q = products
            return softmax.kl_gradient(p, q, rows_of(given, chunk), hidden.dtype, grad_bias)

        return *head_gradients(ctx, [policy, reference], lse.dtype, chunk_grad), *(None,) * 5


@cache  # so that a missing package is reported once
def softmax_for(device_type: str) -> EagerSoftmax:
    """Return the Triton kernels on GPUs and torch operations on CPUs."""
    if not has_kernels(device_type):
        return EagerSoftmax()
    if importlib.util.find_spec("triton") is None:
        logger.warning(
            "the softmax of the LM head runs several times slower than in its kernels, which need `triton`:"
            " CUDA builds of torch come with it, repair the installation with `pip install triton`"
        )
        return EagerSoftmax()
    from verl.models.head.triton_softmax import TritonSoftmax  # noqa: PLC0415 - CPUs need no triton

    return TritonSoftmax()
