# SPDX-License-Identifier: Apache-2.0
"""The softmax over a chunk of head products in Triton kernels."""

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
        _launch(
            triton_kernels.log_prob_statistics,
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
            triton_kernels.log_prob_gradient,
            values, gradients, gradients.stride(0), bias, targets, *map(_dense, given), values.shape[1],
            *transform,
        )  # fmt: skip
        return _finished(gradients, dtype, grad_bias)

    def kl(self, policy: HeadProducts, reference: HeadProducts, results: KLStatistics) -> None:
        _launch(
            triton_kernels.kl_statistics,
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
            triton_kernels.kl_gradient,
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
