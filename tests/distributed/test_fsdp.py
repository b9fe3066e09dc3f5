# SPDX-License-Identifier: Apache-2.0
"""Data types of FSDP2 models."""

import pytest
import torch

from verl.distributed.fsdp import torch_dtype


def test_types_have_short_names_and_torchs_own():
    assert torch_dtype("bf16") is torch_dtype("bfloat16") is torch.bfloat16
    assert torch_dtype("fp16") is torch_dtype("float16") is torch.float16
    assert torch_dtype("fp32") is torch_dtype("float32") is torch.float32


@pytest.mark.parametrize("name", ["int8", "save", "BF16"])
def test_other_names_are_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=f"one of .*'bf16'.*'float32'.*, got '{name}'"):
        torch_dtype(name)
