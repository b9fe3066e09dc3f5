# SPDX-License-Identifier: Apache-2.0
"""Frozen models, in their files until they are used on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from verl.diffusion.stored_parts import data_types, replace_tensors, tensors_of
from verl.distributed.device import host_buffer, is_gpu, synchronize

STAGED_BYTES = 1 << 26  # of page-locked memory
ALIGNMENT = 64  # bytes between the starts of two staged tensors


class FrozenParts:
    """Frozen models whose weights are mapped from files, which no copy in host memory replaces.

    On the CPU, weights of files with another data type are cast, once and one at a time.

    Args:
        dtype: In which the models compute.
        device: Where they do.
    """

    def __init__(self, models: Sequence[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
        self.models, self.dtype, self.device = models, dtype, device
        if not is_gpu(device):
            self._replace(Tensor.to)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Keep the models on the device inside the block; after it, they are in their files again."""
        if not is_gpu(self.device):
            yield
            return
        waiting = [entry for model in self.models for entry in tensors_of(model)]
        try:
            self._load()
            yield
        finally:
            for held, key, _, tensor in waiting:
                held[key] = tensor

    def _load(self) -> None:
        staging = StagingBuffer(self.device)
        self._replace(staging.copy)
        synchronize(self.device.type)  # before its memory is released

    def _replace(self, function: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        for model in self.models:
            dtypes = data_types(model, self.dtype)
            replace_tensors(
                model, lambda name, tensor, dtypes=dtypes: function(tensor, dtypes.get(name, tensor.dtype))
            )


class StagingBuffer:
    """Page-locked memory through which tensors of any size are copied to a GPU.

    Locking the pages of files instead would give each process a copy of them.
    """

    def __init__(self, device: torch.device, size: int = STAGED_BYTES) -> None:
        self.device, self._used = device, 0
        self._buffer = host_buffer(size, device, self)

    def copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy a tensor to the device, cast in host memory; complete when the device is synchronized."""
        found = torch.empty(tensor.shape, dtype=dtype, device=self.device)
        given, taken = tensor.reshape(-1), found.view(-1)
        at_once = len(self._buffer) // dtype.itemsize
        for start in range(0, len(given), at_once):
            piece = given[start : start + at_once]
            staged = self._room(len(piece) * dtype.itemsize).view(dtype).copy_(piece)
            taken[start : start + at_once].copy_(staged, non_blocking=True)
        return found

    def _room(self, size: int) -> Tensor:
        if self._used + size > len(self._buffer):
            synchronize(self.device.type)  # what is staged has arrived
            self._used = 0
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return self._buffer[start : start + size]
