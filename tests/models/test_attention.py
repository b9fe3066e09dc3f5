# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.models import attention
from verl.models.attention import AttentionRule, PackedLayout, attend, packed_attention

LENGTHS = [5, 5, 1, 40, 40, 17]


def tensors(heads=4, kv_heads=2, dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, sum(LENGTHS), dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def layout():
    return PackedLayout.of(torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()]))


def masked(query, key, value, rule):
    """One dense attention over the whole line, by the definitions: (1, N, H, D)."""
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(sum(LENGTHS))
    behind = place[:, None] - place
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
def test_rows_attend_to_themselves_only_under_every_rule(rule, monkeypatch):
    monkeypatch.setattr(attention, "MASKED_CHUNK", 16)  # rows of 40 take several chunks
    monkeypatch.setattr(attention, "MAX_SCORES", 4 * 16 * 40)  # and the two of them two batches
    inputs = tensors()
    out, expected = attend(*inputs, layout(), rule), masked(*inputs, rule)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    for left, right in zip(ours, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def test_the_layout_joins_neighbours_of_equal_length_and_skips_empty_rows():
    found = PackedLayout.of(torch.tensor([0, 3, 3, 6, 10, 13]))

    assert found.runs == ((2, 3), (1, 4), (1, 3))
    assert found.max_length == 4


def test_the_layout_of_the_same_tensor_is_worked_out_once():
    bounds = torch.tensor([0, 3, 5])

    assert PackedLayout.of(bounds) is PackedLayout.of(bounds)


class Module(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(1)}, "mask of its own"),
        ({"dropout": 0.1}, "attention dropout .0.1. is not supported.*attention_dropout` to 0"),
        ({"s_aux": torch.ones(4)}, "asks attention for s_aux"),
        ({"position_bias": torch.ones(4)}, "asks attention for position_bias"),
        ({"is_causal": False, "sliding_window": 4}, "sliding window over both sides"),
        ({"packed_layout": None}, "got no row boundaries"),
    ],
)
def test_what_packed_attention_does_not_do_is_refused_by_name(options, message):
    options = {"attention_mask": None, "packed_layout": layout()} | options

    with pytest.raises(NotImplementedError, match=message):
        packed_attention(Module(), *tensors(), **options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("chunked_attention", "does not do chunked_attention"), ("sliding_attention", "does not say")],
)
def test_a_layer_whose_kind_is_not_handed_over_is_refused(kind, message):
    module = Module()
    module.layer_idx, module.config = 0, type("Config", (), {"layer_types": [kind]})

    with pytest.raises(NotImplementedError, match=message):
        packed_attention(module, *tensors(), None, packed_layout=layout())


def test_no_mask_over_the_whole_line_is_made():
    # 64 rows of 128 tokens: a mask over the line would take 64 MiB, more than all tensors here together.
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    line = torch.randn(1, 1, 64 * 128, 8)
    bounds = PackedLayout.of(torch.arange(65) * 128)
    with Watch():
        for rule in (AttentionRule(1.0), AttentionRule(1.0, window=16)):
            attend(line, line, line, bounds, rule)

    assert largest <= 64 * 128 * 128
