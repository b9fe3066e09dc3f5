# SPDX-License-Identifier: Apache-2.0
"""Tensors of bytes whose memory is used again once no one refers to it."""

import weakref

import numpy as np
import torch
from torch import Tensor


class RecycledMemory:
    """Lends tensors of bytes on a device; any of their views keeps them.

    A GPU's allocator does this itself. On CPU large blocks go back to the system, and filling new ones takes
    longer than receiving what is put there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[np.ndarray] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return a tensor (num_bytes,) uint8 of any values."""
        if self.device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        block = self._free.pop() if self._free else np.empty(0, np.uint8)
        if block.nbytes < num_bytes:
            block = np.empty(num_bytes, np.uint8)
        lent = block[:num_bytes]  # an object of its own, which the tensor's memory refers to
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.from_numpy(lent)
