# SPDX-License-Identifier: Apache-2.0
"""The softmax over a chunk of head products in torch operations, on blocks that stay in the cache."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from verl.distributed.device import is_gpu
from verl.models.head.logit_chunks import HeadProducts, spans

BLOCK_ELEMENTS = 1 << 19  # logits whose softmax is taken at once on CPU: 2 MiB of float32 stay in the cache
BLOCK_ELEMENTS_CUDA = 1 << 22  # two tensors of 16 MiB stay in the L2 cache of an A100 or H100

Columns = TypeVar("Columns", bound=NamedTuple)


class LogProbStatistics(NamedTuple):
    """Results for M tokens, (M,) each; None where not requested."""

    log_probs: Tensor  # of the targets
    lse: Tensor  # logarithm of the sum of the exponentials of all logits
    entropy: Tensor | None
    sum_squares: Tensor | None  # of the probabilities


class LogProbGradients(NamedTuple):
    """Gradients of M tokens' results, (M,) each, with the results that they need."""

    lse: Tensor
    log_probs: Tensor  # gradient
    entropy: Tensor | None  # value
    grad_entropy: Tensor | None  # None if the entropy has no gradient


class KLStatistics(NamedTuple):
    """The KL divergence of M tokens, (M,) each, with p of the policy and q of the reference."""

    kl: Tensor  # below zero only by rounding
    lse: Tensor  # of the policy
    mean_gap: Tensor  # sum over the vocabulary of p (policy's logit - reference's logit)
    ref_lse: Tensor | None = None  # of the reference, if requested


class KLGradients(NamedTuple):
    """Gradients of M tokens' divergence, (M,) each, with the statistics that they need.

    KL(policy || reference) needs `mean_gap`, KL(reference || policy) `ref_lse`; the other one is None.
    """

    lse: Tensor  # of the policy
    kl: Tensor  # gradient
    mean_gap: Tensor | None = None
    ref_lse: Tensor | None = None


class EagerSoftmax:
    """Statistics of softmax(logits), written into given tensors, and gradients with respect to products.

    Gradients overwrite the policy's products. They are returned in `dtype`, possibly as a view of the same
    memory whose rows lie apart, and their sum over the tokens is added to `grad_bias` if it is given.
    """

    def log_probs(self, policy: HeadProducts, targets: Tensor, results: LogProbStatistics) -> None:
        for rows in blocks(policy.values):
            log_probs, lse, entropy, sum_squares = rows_of(results, rows)
            z = logits_of(policy, rows, lse.dtype)
            target = targets[rows, None]
            target_logits = z.gather(1, target.clamp(min=0)).where(target >= 0, math.nan)[:, 0]
            largest = z.amax(1)
            z.sub_(largest[:, None])
            unnormalised = z.exp()
            total = unnormalised.sum(1)
            lse.copy_(largest + total.log())
            log_probs.copy_(target_logits - lse)
            if sum_squares is not None:
                sum_squares.copy_((torch.linalg.vector_norm(unnormalised, dim=1) / total).square_())
            if entropy is not None:
                entropy.copy_(total.log() - unnormalised.mul_(z).sum(1) / total)

    def log_prob_gradient(
        self,
        policy: HeadProducts,
        targets: Tensor,
        given: LogProbGradients,
        dtype: torch.dtype,
        grad_bias: Tensor | None,
    ) -> Tensor:
        # d log_prob / dz = onehot - p;    d entropy / dz = -p (log p + entropy)
        def block_gradient(rows: slice) -> Tensor:
            lse, grad_log_probs, entropy, grad_entropy = rows_of(given, rows)
            z = logits_of(policy, rows, lse.dtype)
            slope = policy.transform.slope(z)
            log_p, grads = z.sub_(lse[:, None]), grad_log_probs[:, None]
            if entropy is None or grad_entropy is None:
                gradient = log_p.exp_().mul_(-grads)
            else:
                p = log_p.exp()
                gradient = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grads)
                gradient = gradient.mul_(p).neg_()
            own = targets[rows, None]
            gradient.scatter_add_(1, own.clamp(min=0), grads.to(gradient.dtype) * (own >= 0))
            return gradient.mul_(slope)

        return overwrite(policy.values, block_gradient, dtype, grad_bias)

    def kl(self, policy: HeadProducts, reference: HeadProducts, results: KLStatistics) -> None:
        for rows in blocks(policy.values):
            kl, lse, mean_gap, ref_lse = rows_of(results, rows)
            z = logits_of(policy, rows, lse.dtype)
            y = logits_of(reference, rows, lse.dtype)
            largest, ref_largest = z.amax(1), y.amax(1)
            z.sub_(largest[:, None])
            y.sub_(ref_largest[:, None])
            gap = z - y
            unnormalised = z.exp_()
            total, ref_total = unnormalised.sum(1), y.exp_().sum(1)
            mean = gap.mul_(unnormalised).sum(1) / total
            # For close models the logarithm of the quotient rounds less than a difference of logarithms.
            kl.copy_(mean - (total / ref_total).log())
            lse.copy_(largest + total.log())
            mean_gap.copy_(mean + (largest - ref_largest))
            if ref_lse is not None:
                ref_lse.copy_(ref_largest + ref_total.log())

    def kl_gradient(
        self,
        policy: HeadProducts,
        reference: HeadProducts,
        given: KLGradients,
        dtype: torch.dtype,
        grad_bias: Tensor | None,
    ) -> Tensor:
        def block_gradient(rows: slice) -> Tensor:
            lse, grad_kl, mean_gap, ref_lse = rows_of(given, rows)
            z, y = (logits_of(products, rows, lse.dtype) for products in (policy, reference))
            slope = policy.transform.slope(z)
            if mean_gap is not None:
                # The gap minus its mean under p is log p - log q - KL.
                gap = torch.sub(z, y, out=y).sub_(mean_gap[:, None])
                gradient = gap.mul_(z.sub_(lse[:, None]).exp_())
            else:
                assert ref_lse is not None, "one of the two directions"
                q = y.sub_(ref_lse[:, None]).exp_()
                gradient = z.sub_(lse[:, None]).exp_().sub_(q)
            return gradient.mul_(grad_kl[:, None]).mul_(slope)

        return overwrite(policy.values, block_gradient, dtype, grad_bias)


def rows_of(columns: Columns, rows: slice) -> Columns:
    """Return the same named tuple of some of the tokens."""
    return columns._make(None if column is None else column[rows] for column in columns)


def blocks(values: Tensor) -> Iterator[slice]:
    elements = BLOCK_ELEMENTS_CUDA if is_gpu(values.device) else BLOCK_ELEMENTS
    for first, last in spans(len(values), max(1, elements // values.shape[1])):
        yield slice(first, last)


def logits_of(products: HeadProducts, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return a copy of a block of head products with bias and transform applied."""
    values, bias, (scale, softcap, temperature) = products
    z = values[rows].to(dtype, copy=True)
    if bias is not None:
        z.add_(bias)
    if softcap is not None:
        z.mul_(scale / softcap).tanh_()
        return z.mul_(softcap / temperature)
    factor = scale / temperature
    return z if factor == 1.0 else z.mul_(factor)


def overwrite(
    values: Tensor, block_gradient: Callable[[slice], Tensor], dtype: torch.dtype, grad_bias: Tensor | None
) -> Tensor:
    """Overwrite products with their gradient, block by block."""
    for rows in blocks(values):
        gradient = block_gradient(rows)
        if grad_bias is not None:
            grad_bias += gradient.sum(0)
        values[rows] = gradient
    return values.to(dtype)
