# SPDX-License-Identifier: Apache-2.0
"""The softmax over a chunk of head products in Triton kernels.

The kernels are custom operators of torch, which fake tensors pass without a launch.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from verl.distributed.device import module_of
from verl.models.head import triton_kernels
from verl.models.head.eager_softmax import (
    EagerSoftmax,
    HeadProducts,
    KLGradients,
    KLStatistics,
    LogProbGradients,
    LogProbStatistics,
)

BLOCK = 4096  # logits that a program holds at once
NUM_WARPS = 8


class TritonSoftmax(EagerSoftmax):
    """The same in kernels that read the products once and hold nothing of their size."""

    def log_probs(self, policy: HeadProducts, targets: Tensor, results: LogProbStatistics) -> None:
        values, bias, transform = policy
        log_prob_statistics(values, bias, targets, *results, *transform)

    def log_prob_gradient(
        self,
        policy: HeadProducts,
        targets: Tensor,
        given: LogProbGradients,
        dtype: torch.dtype,
        grad_bias: Tensor | None,
    ) -> Tensor:
        values, bias, transform = policy
        written = _written_dtype(values, dtype, grad_bias)
        log_prob_gradient(values, written, bias, targets, *(_dense(column) for column in given), *transform)
        return _gradients(values, written, dtype, grad_bias)

    def kl(self, policy: HeadProducts, reference: HeadProducts, results: KLStatistics) -> None:
        kl_statistics(
            policy.values, policy.bias, reference.values, reference.bias, *results,
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
        written = _written_dtype(policy.values, dtype, grad_bias)
        kl_gradient(
            policy.values, written, policy.bias, reference.values, reference.bias,
            *(_dense(column) for column in given), *policy.transform, *reference.transform,
        )  # fmt: skip
        return _gradients(policy.values, written, dtype, grad_bias)


def _dense(column: Tensor | None) -> Tensor | None:
    return None if column is None else column.contiguous()


def _written_dtype(values: Tensor, dtype: torch.dtype, grad_bias: Tensor | None) -> torch.dtype:
    # The bias is summed from gradients that are not yet rounded.
    return dtype if grad_bias is None else values.dtype


def _overlay(values: Tensor, dtype: torch.dtype) -> Tensor:
    """View products as narrower numbers, each row of them at the start of its row of products."""
    return values.view(dtype)[:, : values.shape[1]]


def _gradients(values: Tensor, written: torch.dtype, dtype: torch.dtype, grad_bias: Tensor | None) -> Tensor:
    gradients = _overlay(values, written)
    if grad_bias is not None:
        grad_bias += gradients.sum(0, dtype=grad_bias.dtype)
    return gradients.to(dtype)


def _launch(kernel: Any, values: Tensor, *inputs: Any) -> None:
    # Triton's interpreter takes CPU tensors
    module = module_of(values.device)
    with nullcontext() if module is None else module.device_of(values):
        kernel[(len(values),)](values, *inputs, BLOCK, num_warps=NUM_WARPS)


@torch.library.custom_op(
    "verl::log_prob_statistics", mutates_args=("log_probs", "lse", "entropy", "sum_squares")
)
def log_prob_statistics(
    values: Tensor, bias: Tensor | None, targets: Tensor,
    log_probs: Tensor, lse: Tensor, entropy: Tensor | None, sum_squares: Tensor | None,
    scale: float, softcap: float | None, temperature: float,
) -> None:  # fmt: skip
    """Write statistics of each token, see `LogProbStatistics`."""
    _launch(
        triton_kernels.log_prob_statistics,
        values, bias, targets, log_probs, lse, entropy, sum_squares, values.shape[1],
        scale, softcap, temperature,
    )  # fmt: skip


@torch.library.custom_op("verl::log_prob_gradient", mutates_args=("values",))
def log_prob_gradient(
    values: Tensor, dtype: torch.dtype, bias: Tensor | None, targets: Tensor,
    lse: Tensor, grad_log_probs: Tensor, entropy: Tensor | None, grad_entropy: Tensor | None,
    scale: float, softcap: float | None, temperature: float,
) -> None:  # fmt: skip
    """Overwrite products with their gradient in `dtype`."""
    gradients = _overlay(values, dtype)
    _launch(
        triton_kernels.log_prob_gradient,
        values, gradients, gradients.stride(0), bias, targets, lse, grad_log_probs, entropy, grad_entropy,
        values.shape[1], scale, softcap, temperature,
    )  # fmt: skip


@torch.library.custom_op("verl::kl_statistics", mutates_args=("kl", "lse", "mean_gap", "ref_lse"))
def kl_statistics(
    values: Tensor, bias: Tensor | None, ref_values: Tensor, ref_bias: Tensor | None,
    kl: Tensor, lse: Tensor, mean_gap: Tensor, ref_lse: Tensor | None,
    scale: float, softcap: float | None, temperature: float,
    ref_scale: float, ref_softcap: float | None, ref_temperature: float,
) -> None:  # fmt: skip
    """Write statistics of each token, see `KLStatistics`."""
    _launch(
        triton_kernels.kl_statistics,
        values, bias, ref_values, ref_bias, kl, lse, mean_gap, ref_lse, values.shape[1],
        scale, softcap, temperature, ref_scale, ref_softcap, ref_temperature,
    )  # fmt: skip


@torch.library.custom_op("verl::kl_gradient", mutates_args=("values",))
def kl_gradient(
    values: Tensor, dtype: torch.dtype, bias: Tensor | None, ref_values: Tensor, ref_bias: Tensor | None,
    lse: Tensor, grad_kl: Tensor, mean_gap: Tensor | None, ref_lse: Tensor | None,
    scale: float, softcap: float | None, temperature: float,
    ref_scale: float, ref_softcap: float | None, ref_temperature: float,
) -> None:  # fmt: skip
    """Overwrite the policy's products with their gradient in `dtype`."""
    gradients = _overlay(values, dtype)
    _launch(
        triton_kernels.kl_gradient,
        values, gradients, gradients.stride(0), bias, ref_values, ref_bias, lse, grad_kl, mean_gap, ref_lse,
        values.shape[1], scale, softcap, temperature, ref_scale, ref_softcap, ref_temperature,
    )  # fmt: skip


def _check_devices(*inputs: Any) -> None:
    """Stand for a kernel on fake tensors: results are written and none is made."""
    devices = {str(tensor.device) for tensor in inputs if isinstance(tensor, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"the head's kernels need all tensors on one device, got {sorted(devices)}")


for _operator in (log_prob_statistics, log_prob_gradient, kl_statistics, kl_gradient):
    _operator.register_fake(_check_devices)
