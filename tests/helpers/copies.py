# SPDX-License-Identifier: Apache-2.0
"""Copies from the CPU to a meta device, from which nothing can be read back."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountCopies(TorchDispatchMode):
    """Counts the copies of tensors from the CPU to the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_meta:
            self.copies += any(isinstance(arg, torch.Tensor) and arg.device.type == "cpu" for arg in args)
        return out
