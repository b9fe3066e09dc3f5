# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.models.attention.interface import packed_attention
from verl.models.attention.layouts import PackedLayout


def tensors():
    return [torch.randn(1, heads, 8, 4) for heads in (4, 2, 2)]


def layout():
    return PackedLayout.of(torch.tensor([0, 5, 8]))


class Module(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(1)}, "mask of its own"),
        ({"dropout": 0.1}, "attention dropout .0.1., which is not supported.*attention_dropout` to 0"),
        ({"position_bias": torch.ones(4)}, "passes position_bias to attention"),
        ({"is_causal": False, "sliding_window": 4}, "two-sided sliding window"),
        ({"packed_layout": None}, "got no sequence boundaries"),
    ],
)
def test_unsupported_requests_are_refused_by_name(options, message):
    options = {"attention_mask": None, "packed_layout": layout()} | options

    with pytest.raises(NotImplementedError, match=message):
        packed_attention(Module(), *tensors(), **options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("linear_attention", "uses linear_attention in layer 0"),
        ("sliding_attention", "does not pass the sliding window"),
    ],
)
def test_an_unsupported_layer_type_is_refused(kind, message):
    module = Module()
    module.layer_idx, module.config = 0, type("Config", (), {"layer_types": [kind]})

    with pytest.raises(NotImplementedError, match=message):
        packed_attention(module, *tensors(), None, packed_layout=layout())
