# SPDX-License-Identifier: Apache-2.0
"""The softmax over a chunk of head products in Triton kernels.

Each program reads the logits of one token once, block by block. Sums are kept in the dtype of the results,
per lane, and scaled down whenever a block has a larger logit than all before it. The formulas are those of
`eager_softmax`; logits of -inf have probability zero.
"""

# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# Types inside a kernel are those of Triton's language, not of its Python functions.

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.distributed.device import module_of
from verl.models.head.eager_softmax import (
    EagerSoftmax,
    HeadProducts,
    KLGradients,
    KLStatistics,
    LogProbGradients,
    LogProbStatistics,
)

LOWEST = tl.constexpr(-1e30)  # below every logit, and finite: a difference of two of them is a number


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    far = 1 - 2 / (tl.exp(2 * x) + 1)  # with exact limits where the exponential is zero or infinite
    if x.dtype == tl.float64:
        return far
    # Near zero the difference cancels. A polynomial in x**2, fitted to |x| < 0.625 within 2e-8.
    z = x * x
    tail = -0.333333291 + z * (0.133327822 + z * (-0.05385249 + z * (0.0210036153 - z * 0.00610491854)))
    return tl.where(z < 0.390625, x + x * z * tail, far)


@triton.jit
def _logits(
    products: tl.tensor, bias: tl.tensor | None, columns: tl.tensor, inside: tl.tensor, dtype: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr, temperature: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    z = tl.load(products + columns, mask=inside, other=0.0).to(dtype)
    if bias is not None:
        z += tl.load(bias + columns, mask=inside, other=0.0).to(dtype)
    if softcap is not None:
        return _tanh(z * (scale / softcap)) * (softcap / temperature)
    return z * (scale / temperature)


@triton.jit
def _slope(z: tl.tensor, scale: tl.constexpr, softcap: tl.constexpr, temperature: tl.constexpr) -> tl.tensor:
    if softcap is not None:
        tanh = z * (temperature / softcap)
        return (1 - tanh * tanh) * (scale / temperature)
    return tl.full(z.shape, scale / temperature, z.dtype)


@triton.jit
def _overwrite(gradients: tl.tensor, inside: tl.tensor, values: tl.tensor) -> None:
    # Narrower gradients lie over products of this block and of earlier ones, which other threads read.
    tl.debug_barrier()
    tl.store(gradients, values.to(gradients.dtype.element_ty), mask=inside)


@triton.jit
def log_prob_statistics(
    products: tl.tensor, bias: tl.tensor | None, targets: tl.tensor,  # products are (M, vocabulary)
    log_probs: tl.tensor, lse: tl.tensor, entropy: tl.tensor | None, sum_squares: tl.tensor | None,
    vocabulary: int,
    scale: tl.constexpr, softcap: tl.constexpr, temperature: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    products += row * vocabulary
    dtype: tl.constexpr = lse.dtype.element_ty
    largest = tl.full([], LOWEST, dtype)
    total = tl.zeros([block], dtype)
    moment = tl.zeros([block], dtype)  # sum of exp(z - largest) (z - largest)
    squares = tl.zeros([block], dtype)
    for start in range(0, vocabulary, block):
        columns = start + tl.arange(0, block)
        inside = columns < vocabulary
        z = _logits(products, bias, columns, inside, dtype, scale, softcap, temperature)
        z = tl.where(inside, z, float("-inf"))
        larger = tl.maximum(largest, tl.max(z, 0))
        decay = tl.exp(largest - larger)
        exponential = tl.exp(z - larger)
        if entropy is not None:
            term = tl.where(exponential == 0, 0.0, exponential * (z - larger))
            moment = decay * (moment + (largest - larger) * total) + term
        if sum_squares is not None:
            squares = decay * decay * squares + exponential * exponential
        total = decay * total + exponential
        largest = larger
    whole = tl.sum(total, 0)
    row_lse = largest + tl.log(whole)
    tl.store(lse + row, row_lse)
    target = tl.load(targets + row)
    exists = (target >= 0) & (target < vocabulary)
    z = _logits(products, bias, target, exists, dtype, scale, softcap, temperature)
    tl.store(log_probs + row, tl.where(exists, z, float("nan")) - row_lse)
    if entropy is not None:
        tl.store(entropy + row, tl.log(whole) - tl.sum(moment, 0) / whole)
    if sum_squares is not None:
        tl.store(sum_squares + row, tl.sum(squares, 0) / (whole * whole))


@triton.jit
def log_prob_gradient(
    products: tl.tensor,
    gradients: tl.tensor,  # of as many or fewer bytes: the same memory, each row at the start of its products
    gradient_stride: int, bias: tl.tensor | None, targets: tl.tensor, lse: tl.tensor,
    grad_log_probs: tl.tensor, entropy: tl.tensor | None, grad_entropy: tl.tensor | None, vocabulary: int,
    scale: tl.constexpr, softcap: tl.constexpr, temperature: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    products += row * vocabulary
    gradients += row * gradient_stride
    dtype: tl.constexpr = lse.dtype.element_ty
    row_lse = tl.load(lse + row)
    target = tl.load(targets + row)
    grad_log_prob = tl.load(grad_log_probs + row)
    if grad_entropy is not None:
        row_entropy = tl.load(entropy + row)
        row_grad_entropy = tl.load(grad_entropy + row)
    for start in range(0, vocabulary, block):
        columns = start + tl.arange(0, block)
        inside = columns < vocabulary
        z = _logits(products, bias, columns, inside, dtype, scale, softcap, temperature)
        log_p = z - row_lse
        p = tl.exp(log_p)
        gradient = tl.where(columns == target, grad_log_prob, 0.0) - p * grad_log_prob
        if grad_entropy is not None:
            gradient -= tl.where(p == 0, 0.0, p * (log_p + row_entropy) * row_grad_entropy)
        _overwrite(gradients + columns, inside, gradient * _slope(z, scale, softcap, temperature))


@triton.jit
def kl_statistics(
    products: tl.tensor, bias: tl.tensor | None, ref_products: tl.tensor, ref_bias: tl.tensor | None,
    kl: tl.tensor, lse: tl.tensor, mean_gap: tl.tensor, ref_lse: tl.tensor | None, vocabulary: int,
    scale: tl.constexpr, softcap: tl.constexpr, temperature: tl.constexpr,
    ref_scale: tl.constexpr, ref_softcap: tl.constexpr, ref_temperature: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    products += row * vocabulary
    ref_products += row * vocabulary
    dtype: tl.constexpr = lse.dtype.element_ty
    largest = tl.full([], LOWEST, dtype)
    ref_largest = tl.full([], LOWEST, dtype)
    total = tl.zeros([block], dtype)
    ref_total = tl.zeros([block], dtype)
    moment = tl.zeros([block], dtype)  # sum of exp(z - largest) ((z - largest) - (y - ref_largest))
    for start in range(0, vocabulary, block):
        columns = start + tl.arange(0, block)
        inside = columns < vocabulary
        z = _logits(products, bias, columns, inside, dtype, scale, softcap, temperature)
        y = _logits(ref_products, ref_bias, columns, inside, dtype, ref_scale, ref_softcap, ref_temperature)
        z = tl.where(inside, z, float("-inf"))
        y = tl.where(inside, y, float("-inf"))
        larger = tl.maximum(largest, tl.max(z, 0))
        ref_larger = tl.maximum(ref_largest, tl.max(y, 0))
        decay = tl.exp(largest - larger)
        exponential = tl.exp(z - larger)
        moved = (largest - larger) - (ref_largest - ref_larger)
        term = tl.where(exponential == 0, 0.0, exponential * ((z - larger) - (y - ref_larger)))
        moment = decay * (moment + moved * total) + term
        total = decay * total + exponential
        ref_total = tl.exp(ref_largest - ref_larger) * ref_total + tl.exp(y - ref_larger)
        largest, ref_largest = larger, ref_larger
    whole = tl.sum(total, 0)
    mean = tl.sum(moment, 0) / whole
    # For close models the logarithm of the quotient rounds less than a difference of logarithms.
    ref_whole = tl.sum(ref_total, 0)
    tl.store(kl + row, mean - tl.log(whole / ref_whole))
    tl.store(lse + row, largest + tl.log(whole))
    tl.store(mean_gap + row, mean + (largest - ref_largest))
    if ref_lse is not None:
        tl.store(ref_lse + row, ref_largest + tl.log(ref_whole))


@triton.jit
def kl_gradient(
    products: tl.tensor,
    gradients: tl.tensor,  # as above
    gradient_stride: int, bias: tl.tensor | None, ref_products: tl.tensor, ref_bias: tl.tensor | None,
    lse: tl.tensor, grad_kl: tl.tensor,
    mean_gap: tl.tensor | None,  # for KL(policy || reference)
    ref_lse: tl.tensor | None,  # for KL(reference || policy)
    vocabulary: int,
    scale: tl.constexpr, softcap: tl.constexpr, temperature: tl.constexpr,
    ref_scale: tl.constexpr, ref_softcap: tl.constexpr, ref_temperature: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    products += row * vocabulary
    ref_products += row * vocabulary
    gradients += row * gradient_stride
    dtype: tl.constexpr = lse.dtype.element_ty
    row_lse = tl.load(lse + row)
    row_grad = tl.load(grad_kl + row)
    if mean_gap is not None:
        row_gap = tl.load(mean_gap + row)
    else:
        row_ref_lse = tl.load(ref_lse + row)
    for start in range(0, vocabulary, block):
        columns = start + tl.arange(0, block)
        inside = columns < vocabulary
        z = _logits(products, bias, columns, inside, dtype, scale, softcap, temperature)
        y = _logits(ref_products, ref_bias, columns, inside, dtype, ref_scale, ref_softcap, ref_temperature)
        p = tl.exp(z - row_lse)
        if mean_gap is not None:
            # The gap minus its mean under p is log p - log q - KL.
            gradient = tl.where(p == 0, 0.0, p * (z - y - row_gap) * row_grad)
        else:
            gradient = (p - tl.exp(y - row_ref_lse)) * row_grad
        _overwrite(gradients + columns, inside, gradient * _slope(z, scale, softcap, temperature))


BLOCK = 4096  # logits that a program holds at once
NUM_WARPS = 8


class TritonSoftmax(EagerSoftmax):
    """The same in kernels that read the products once and hold nothing of their size."""

    def log_probs(self, policy: HeadProducts, targets: Tensor, results: LogProbStatistics) -> None:
        values, bias, transform = policy
        _launch(
            log_prob_statistics,
            values, bias, targets, *results, values.shape[1], *transform,
        )  # fmt: skip

    def log_prob_gradient(
        self,
        policy: HeadProducts,
        targets: Tensor,
        given: LogProbGradients,
        dtype: torch.dtype,
        grad_bias: Tensor | None,
    ) -> Tensor:
        values, bias, transform = policy
        gradients = _overlay(values, dtype, grad_bias)
        _launch(
            log_prob_gradient,
            values, gradients, gradients.stride(0), bias, targets, *map(_dense, given), values.shape[1],
            *transform,
        )  # fmt: skip
        return _finished(gradients, dtype, grad_bias)

    def kl(self, policy: HeadProducts, reference: HeadProducts, results: KLStatistics) -> None:
        _launch(
            kl_statistics,
            policy.values, policy.bias, reference.values, reference.bias, *results, policy.values.shape[1],
            *policy.transform, *reference.transform,
        )  # fmt: skip

    def kl_gradient(
        self,
        policy: HeadProducts,
        reference: HeadProducts,
        given: KLGradients,
        dtype: torch.dtype,
        grad_bias: Tensor | None,
    ) -> Tensor:
        gradients = _overlay(policy.values, dtype, grad_bias)
        _launch(
            kl_gradient,
            policy.values, gradients, gradients.stride(0), policy.bias, reference.values, reference.bias,
            *map(_dense, given), policy.values.shape[1], *policy.transform, *reference.transform,
        )  # fmt: skip
        return _finished(gradients, dtype, grad_bias)


def _dense(column: Tensor | None) -> Tensor | None:
    return None if column is None else column.contiguous()


def _overlay(values: Tensor, dtype: torch.dtype, grad_bias: Tensor | None) -> Tensor:
    """View products as gradients of `dtype`, each row of them at the start of its row of products."""
    # The bias is summed from gradients that are not yet rounded.
    return values.view(dtype if grad_bias is None else values.dtype)[:, : values.shape[1]]


def _finished(gradients: Tensor, dtype: torch.dtype, grad_bias: Tensor | None) -> Tensor:
    if grad_bias is not None:
        grad_bias += gradients.sum(0, dtype=grad_bias.dtype)
    return gradients.to(dtype)


def _launch(kernel: Any, values: Tensor, *inputs: Any) -> None:
    # Triton's interpreter takes CPU tensors
    module = module_of(values.device)
    with nullcontext() if module is None else module.device_of(values):
        kernel[(len(values),)](values, *inputs, BLOCK, num_warps=NUM_WARPS)
