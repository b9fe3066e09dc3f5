# SPDX-License-Identifier: Apache-2.0
"""The head's softmax of a device against torch operations, over a vocabulary of several blocks."""

import pytest
import torch

from tests.models.head_kernel_laws import (
    TRANSFORMS,
    assert_close,
    gradient_by,
    kl_by,
    kl_gradient_by,
    log_probs_by,
    numbers,
    products,
)
from verl.distributed.device import is_gpu
from verl.models.fused_log_probs import softmax_for
from verl.models.head.eager_softmax import EagerSoftmax
from verl.models.head.triton_softmax import TritonSoftmax

pytestmark = pytest.mark.nightly("verl/models/head")

ROWS, VOCABULARY = 200, 12289  # three blocks and one token
EAGER = EagerSoftmax()
RUNS = 3  # a race between threads would show as a difference
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of gradients


def head(device, transform, bias, seed=0):
    made = products(ROWS, VOCABULARY, torch.float32, bias, transform, seed=seed)
    offset = None if made.bias is None else made.bias.to(device)
    return made._replace(values=made.values.to(device), bias=offset)


def test_only_a_gpu_takes_the_kernels(device):
    assert isinstance(softmax_for(device), TritonSoftmax) == is_gpu(device)


@pytest.mark.parametrize("transform", [TRANSFORMS[1], TRANSFORMS[4]])
@pytest.mark.parametrize("bias", [None, torch.bfloat16])
def test_log_probs_and_gradients_equal_torch_operations_in_every_run(device, bias, transform):
    policy = head(device, transform, bias)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(0))
    targets[:2] = torch.tensor([0, VOCABULARY - 1])
    targets, grads = targets.to(device), numbers(2, ROWS, seed=7).to(device)

    found, *again = (log_probs_by(softmax_for(device), policy, targets) for _ in range(RUNS))
    for ours, theirs in zip(found, log_probs_by(EAGER, policy, targets), strict=True):
        assert_close(ours, theirs, 1e-5)
    assert all(torch.equal(*columns) for run in again for columns in zip(run, found, strict=True))
    for dtype, tolerance in TOLERANCE.items():
        runs = [gradient_by(softmax_for(device), policy, targets, dtype, grads, True) for _ in range(RUNS)]
        assert_close(runs[0], gradient_by(EAGER, policy, targets, dtype, grads, True), tolerance)
        assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("transform", [TRANSFORMS[1], TRANSFORMS[4]])
@pytest.mark.parametrize("bias", [None, torch.bfloat16])
def test_the_kl_and_its_gradient_equal_torch_operations_in_every_run(device, bias, transform):
    policy, reference = head(device, transform, bias), head(device, transform, None, seed=3)
    grad = numbers(ROWS, seed=7).to(device)

    both = (softmax_for(device), EAGER)
    results = (kl_by(softmax, policy, reference, with_ref_lse=True) for softmax in both)
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, 1e-5)
    for dtype, tolerance in TOLERANCE.items():
        runs = [kl_gradient_by(softmax_for(device), policy, reference, dtype, grad) for _ in range(RUNS)]
        assert_close(runs[0], kl_gradient_by(EAGER, policy, reference, dtype, grad), tolerance)
        assert all(torch.equal(run, runs[0]) for run in runs)


def test_the_bias_gets_the_sum_of_gradients(device):
    policy, grads = head(device, TRANSFORMS[1], torch.float32), numbers(2, ROWS, seed=7).to(device)
    targets = torch.arange(ROWS, device=device)
    sums = torch.zeros(2, VOCABULARY, device=device)

    for softmax, grad_bias in zip((softmax_for(device), EAGER), sums, strict=True):
        gradient_by(softmax, policy, targets, torch.bfloat16, grads, True, grad_bias)

    assert_close(*sums, 1e-5)
