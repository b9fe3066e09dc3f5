# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from tests.helpers.largest_tensor import LargestTensor
from verl.models.attention import kernels
from verl.models.attention.kernels import AttentionRule
from verl.models.attention.layouts import PackedLayout

LENGTHS = [5, 5, 1, 40, 40, 17]


def tensors(heads=4, kv_heads=2, dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, sum(LENGTHS), dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def layout():
    return PackedLayout.of(torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()]))


def masked(query, key, value, rule):
    """One dense attention over all packed tokens, by the definitions: (1, N, H, D)."""
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.arange(sum(LENGTHS))
    behind = position[:, None] - position
    seen = row[:, None] == row
    if rule.is_causal:
        seen = seen & (behind >= 0)
    if rule.window is not None:
        seen = seen & (behind < rule.window)
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return (weights @ value.repeat_interleave(repeats, 1)).transpose(1, 2)


RULES = [
    AttentionRule(0.3),
    AttentionRule(0.3, is_causal=False),
    AttentionRule(0.3, window=7),
    AttentionRule(0.3, window=1),
    AttentionRule(0.3, softcap=0.5),
    AttentionRule(0.3, is_causal=False, softcap=0.5),
    AttentionRule(0.3, window=7, softcap=0.5),
]


@pytest.mark.parametrize("rule", RULES)
def test_sequences_attend_only_to_themselves_under_every_rule(rule, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_SCORES", 2 * 4 * 16 * 40)  # two rows of 40 take several chunks
    inputs = tensors()
    out, expected = layout().attend(*inputs, rule), masked(*inputs, rule)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    for left, right in zip(ours, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def test_no_mask_over_all_packed_tokens_is_built():
    # 64 rows of 128 tokens: a mask over all tokens would take 64 MiB, more than all tensors here together.
    inputs = torch.randn(1, 1, 64 * 128, 8)
    bounds = PackedLayout.of(torch.arange(65) * 128)
    with LargestTensor() as largest:
        for rule in (AttentionRule(1.0), AttentionRule(1.0, window=16)):
            bounds.attend(inputs, inputs, inputs, rule)

    assert largest.numel <= 64 * 128 * 128


@pytest.mark.parametrize("window", [None, 300])
def test_a_soft_cap_never_holds_the_scores_of_a_long_sequence(window, monkeypatch):
    # Scores of 2048 tokens would be 4 Mi numbers for each head, kept for backward.
    monkeypatch.setattr(kernels, "MAX_SCORES", 1 << 15)
    held = 0

    def save(tensor):
        nonlocal held
        held += tensor.numel()
        return tensor

    inputs = [torch.randn(1, 2, 2048, 8, requires_grad=True) for _ in range(3)]
    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = PackedLayout.of(torch.tensor([0, 2048])).attend(*inputs, AttentionRule(1.0, True, window, 5.0))
        out.sum().backward()

    size = 2 * 2048 * 8
    assert largest.numel <= max(1 << 15, size)
    assert held <= 5 * size
