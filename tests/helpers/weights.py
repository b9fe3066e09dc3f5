# SPDX-License-Identifier: Apache-2.0
"""Tensors of every kind that weights may be, for tests of their transport."""

import torch

TENSORS = {
    "matrix": torch.randn(7, 5),
    "bf16": torch.randn(3, 4).bfloat16(),
    "large": torch.randn(100),  # more than a bucket
    "scalar": torch.tensor(2.5),
    "not contiguous": torch.arange(12).view(3, 4).t(),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3),
}
