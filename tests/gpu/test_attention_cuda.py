# SPDX-License-Identifier: Apache-2.0
"""Packed attention and fused log-probabilities on a device's kernels against the CPU in float32."""

import pytest
import torch

from verl.models.attention.kernels import AttentionRule
from verl.models.attention.layouts import Blocks, PackedLayout
from verl.models.fused_log_probs import linear_log_probs
from verl.models.head.logit_chunks import HeadLogits, LogitTransform

LENGTHS = [5, 5, 1, 140, 140, 77]
RULES = [
    AttentionRule(0.125),
    AttentionRule(0.125, is_causal=False),
    AttentionRule(0.125, window=33),
    AttentionRule(0.125, window=1000),
    AttentionRule(0.125, softcap=2.0),
]
# Relative to the largest value; bf16 rounds inputs and results to 8 bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def attention_results(device, dtype, rule):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, sum(LENGTHS), 64, generator=generator) for heads in (4, 2, 2)]
    tensors = [tensor.to(dtype).to(device, dtype).requires_grad_() for tensor in tensors]
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    out = PackedLayout.of(bounds).attend(*tensors, rule)
    weights = torch.randn(out.shape, generator=generator).to(device, dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


def assert_close(ours, theirs, tolerance):
    for left, right in zip(ours, theirs, strict=True):
        difference = (left.float().cpu() - right.float()).abs().max()
        assert difference <= tolerance * right.float().abs().max()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_equals_float32_on_the_cpu(device, dtype, rule):
    rounded = attention_results(device, dtype, rule)

    # The CPU computes in float32 what the device computes from the same rounded inputs.
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, sum(LENGTHS), 64, generator=generator).to(dtype) for heads in (4, 2, 2)]
    tensors = [tensor.float().requires_grad_() for tensor in tensors]
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    out = PackedLayout.of(bounds).attend(*tensors, rule)
    weights = torch.randn(out.shape, generator=generator).to(dtype).float()

    assert_close(rounded, [out, *torch.autograd.grad((out * weights).sum(), tensors)], TOLERANCE[dtype])


SHARED_RULES = [
    AttentionRule(0.125),
    AttentionRule(0.125, window=33),
    AttentionRule(0.125, chunk=48),
    AttentionRule(0.125, softcap=2.0),
]
BLOCKS = Blocks(((3, 60), (60, 61), (90, 129), (260, 310)))  # images in prompts


def shared_results(device, dtype, working, rule, blocks, sinks):
    """Groups with several, one, empty and no responses; inputs rounded to `dtype`, computed in `working`."""
    groups = [(130, [40, 1, 0, 77]), (5, [3]), (64, []), (9, [8, 8])]
    layout = PackedLayout.of_groups(groups, device, blocks)
    generator = torch.Generator().manual_seed(0)
    size = layout.calls[0].queries.tokens.stop
    tensors = [torch.randn(1, heads, size, 64, generator=generator).to(dtype) for heads in (4, 2, 2)]
    tensors = [tensor.to(device, working).requires_grad_() for tensor in tensors]
    if sinks:
        own = torch.tensor([-1.0, 0.5, 2.0, 4.0]).to(dtype).to(device, working)
        tensors.append(own.requires_grad_())
    out = layout.attend(*tensors[:3], rule, *tensors[3:])
    weights = torch.randn(out.shape, generator=generator).to(dtype).to(device, working)
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["causal", "blocks"])
@pytest.mark.parametrize("rule", SHARED_RULES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_behind_shared_prompts_equals_float32_on_the_cpu(device, dtype, rule, blocks, sinks):
    ours = shared_results(device, dtype, dtype, rule, blocks, sinks)
    theirs = shared_results("cpu", dtype, torch.float32, rule, blocks, sinks)

    assert_close(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [None, 1 << 16])
def test_log_probs_equal_float32_on_the_cpu(device, dtype, chunk_bytes):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(99, 64, generator=generator).to(dtype),
        torch.randn(1000, 64, generator=generator).to(dtype),
    )
    targets = torch.randint(1000, (99,), generator=generator)
    results = []
    for place, working in ((device, dtype), ("cpu", torch.float32)):
        inputs = [tensor.to(place, working).requires_grad_() for tensor in (hidden, weight)]
        result = linear_log_probs(
            HeadLogits(*inputs, transform=LogitTransform(temperature=0.7)),
            targets.to(place),
            with_entropy=True,
            chunk_bytes=chunk_bytes,
        )
        loss = result.log_probs.sum() + result.entropy.sum()
        found = [result.log_probs, result.entropy, *torch.autograd.grad(loss, inputs)]
        results.append([tensor.detach() for tensor in found])

    # The CPU also rounds the logits of half precision: 2**-4 where they are 16 to 32.
    is_rounded = device == "cpu" and dtype != torch.float32
    assert_close(*results, 0.1 if is_rounded else TOLERANCE[dtype])
