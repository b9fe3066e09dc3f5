# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, entropy and KL divergence from hidden states, without holding the full logits.

Logits are the largest tensor of a training step. They are computed for a chunk of tokens at a time, in the
forward and again in the backward pass, with a few numbers saved per token.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.logit_chunks import (
    HeadLogits,
    LogitTransform,
    autocast_head,
    blocks,
    chunk_rows,
    chunks,
    head_gradients,
    transformed,
)


class TokenLogProbs(NamedTuple):
    """Float32 results, one number per token; None if not requested."""

    log_probs: Tensor  # of the given tokens
    entropy: Tensor | None = None  # of the distribution over the vocabulary, nats
    sum_squared_probs: Tensor | None = None  # sum over the vocabulary of p**2, in (0, 1]; has no gradient
    kl: Tensor | None = None  # KL(policy || reference) over the vocabulary, nats


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
    return TokenLogProbs(*_LinearLogProbs.apply(*policy, targets, with_entropy, with_sum_squares, rows))


def linear_kl(
    policy: HeadLogits,  # of N tokens; N may be zero
    reference: HeadLogits,  # same tokens and vocabulary; must stay unchanged until the backward pass
    chunk_bytes: int | None = None,  # bytes of both models' logits held at once
) -> Tensor:
    """Compute the KL divergence of a policy's distribution from a reference's, for each token.

        p = softmax(transform(hidden @ weight.T + bias));  q likewise from `reference`
        KL(p || q) = sum_v p_v (log p_v - log q_v);    d KL / dz_v = p_v (log p_v - log q_v - KL)

    Returns (N,) float32 nats, never negative. Gradients do not reach the reference.
    """
    (hidden, weight, *_), (ref_hidden, ref_weight, *_) = policy, reference
    if len(hidden) != len(ref_hidden) or len(weight) != len(ref_weight):
        raise ValueError(
            f"policy and reference need the same tokens and vocabulary: hidden {tuple(hidden.shape)} and"
            f" {tuple(ref_hidden.shape)}, weight {tuple(weight.shape)} and {tuple(ref_weight.shape)}"
        )
    policy = autocast_head(policy)
    with torch.no_grad():
        reference = autocast_head(reference)
    return _LinearKL.apply(*policy, reference, chunk_rows([policy, reference], chunk_bytes))


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        targets: Tensor,
        with_entropy: bool,
        with_sum_squares: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=accurate)
        lse = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        sum_squares = torch.empty_like(log_probs) if with_sum_squares else None
        for chunk, (logits,) in chunks([HeadLogits(hidden, weight)], rows):
            for block, part in blocks(chunk, weight):
                z = transformed(logits[part], bias, transform, accurate)
                log_probs[block] = z.gather(1, targets[block, None])[:, 0]
                largest = z.amax(1)
                z.sub_(largest[:, None])
                unnormalised = z.exp()
                total = unnormalised.sum(1)
                lse[block] = largest + total.log()
                if sum_squares is not None:
                    sum_squares[block] = (torch.linalg.vector_norm(unnormalised, dim=1) / total).square_()
                if entropy is not None:
                    entropy[block] = total.log() - unnormalised.mul_(z).sum(1) / total
        log_probs -= lse
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.transform, ctx.rows = transform, rows
        ctx.set_materialize_grads(False)
        return log_probs, entropy, sum_squares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_sum_squares: Tensor | None,
    ) -> tuple:
        if grad_sum_squares is not None:
            raise NotImplementedError("`sum_squared_probs` has no gradient: detach it before use in a loss")
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 8
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(lse)

        def block_grad(block: slice, logits: Tensor) -> Tensor:
            return _log_prob_grad(
                transformed(logits, bias, ctx.transform, lse.dtype),
                targets[block], lse[block], ctx.transform, grad_log_probs[block],
                None if grad_entropy is None else (entropy[block], grad_entropy[block]),
            )  # fmt: skip

        return *head_gradients(ctx, [HeadLogits(hidden, weight, bias)], lse.dtype, block_grad), *(None,) * 5


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        reference: HeadLogits,
        rows: int,
    ) -> Tensor:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        kl = hidden.new_empty(len(hidden), dtype=accurate)
        lse, mean_gap = torch.empty_like(kl), torch.empty_like(kl)
        for chunk, (logits, ref_logits) in chunks([HeadLogits(hidden, weight), reference], rows):
            for block, part in blocks(chunk, weight):
                z = transformed(logits[part], bias, transform, accurate)
                y = transformed(ref_logits[part], reference.bias, reference.transform, accurate)
                largest, ref_largest = z.amax(1), y.amax(1)
                z.sub_(largest[:, None])
                y.sub_(ref_largest[:, None])
                gap = z - y
                unnormalised = z.exp_()
                total, ref_total = unnormalised.sum(1), y.exp_().sum(1)
                mean = gap.mul_(unnormalised).sum(1) / total
                # For close models the logarithm of the quotient rounds less than a difference of logarithms.
                kl[block] = mean - (total / ref_total).log()
                lse[block] = largest + total.log()
                mean_gap[block] = mean + (largest - ref_largest)
        ctx.save_for_backward(hidden, weight, bias, lse, mean_gap, *reference[:3])
        ctx.transform, ctx.ref_transform, ctx.rows = transform, reference.transform, rows
        return kl.clamp_(min=0)  # below zero only by rounding

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple:
        hidden, weight, bias, lse, mean_gap, ref_hidden, ref_weight, ref_bias = ctx.saved_tensors

        def block_grad(block: slice, logits: Tensor, ref_logits: Tensor) -> Tensor:
            # The gap minus its mean under p is log p - log q - KL.
            z = transformed(logits, bias, ctx.transform, lse.dtype)
            gap = z - transformed(ref_logits, ref_bias, ctx.ref_transform, lse.dtype)
            slope = ctx.transform.slope(z)
            p = z.sub_(lse[block, None]).exp_()
            return gap.sub_(mean_gap[block, None]).mul_(p).mul_(grad_kl[block, None]).mul_(slope)

        heads = [HeadLogits(hidden, weight, bias), HeadLogits(ref_hidden, ref_weight)]
        return *head_gradients(ctx, heads, lse.dtype, block_grad), None, None, None


def _log_prob_grad(
    z: Tensor,
    targets: Tensor,
    lse: Tensor,
    transform: LogitTransform,
    grad_log_probs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute the gradient with respect to `hidden @ weight.T` for a block of tokens; `z` is overwritten.

    d log_prob / dz = onehot - p;    d entropy / dz = -p (log p + entropy)
    """
    slope = transform.slope(z)
    log_p = z.sub_(lse[:, None])
    if entropy is None:
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        value, grad_value = entropy
        p = log_p.exp()
        grad = log_p.add_(value[:, None]).mul_(grad_value[:, None]).add_(grad_log_probs[:, None])
        grad = grad.mul_(p).neg_()
    grad.scatter_add_(1, targets[:, None], grad_log_probs[:, None].to(grad.dtype))
    return grad.mul_(slope)
