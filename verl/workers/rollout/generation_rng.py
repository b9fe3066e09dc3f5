# SPDX-License-Identifier: Apache-2.0
"""Separate random streams for training and sampling in one process.

Engines draw from the global generators of torch, CUDA, numpy and Python, as training does. `GenerationRng`
keeps a second set of states and swaps the two around generation. Ranks of one tensor-parallel group must hold
equal streams, or they sample different tokens without any error.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from verl.distributed.device import gpu_random_state, is_gpu, set_gpu_random_state, set_seed


def capture(device: str) -> dict[str, Any]:
    """Return the states of all global generators; of GPUs only the current device's.

    They are tensors, numbers and lists, which `torch.load(weights_only=True)` reads.
    """
    numpy_state: Any = np.random.get_state()
    name, keys, *position = numpy_state
    version, words, gauss = random.getstate()
    return {
        "torch_cpu": torch.get_rng_state(),
        "torch_cuda": gpu_random_state() if is_gpu(device) else None,  # the name is that of checkpoints
        "numpy": [name, keys.tolist(), *position],
        "python": [version, list(words), gauss],
    }


def restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch_cpu"])
    set_gpu_random_state(state["torch_cuda"])
    np.random.set_state(tuple(state["numpy"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


@contextmanager
def preserved_rng(device: str) -> Iterator[None]:
    """Restore the global generators after the block."""
    before = capture(device)
    try:
        yield
    finally:
        restore(before)


class GenerationRng:
    """The random stream of sampling."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        with preserved_rng(device):
            set_seed(seed)  # of all GPUs as well
            self._state = capture(device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        with preserved_rng(self.device):
            restore(self._state)
            try:
                yield
            finally:
                self._state = capture(self.device)

    def state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`."""
        gpu = state["torch_cuda"] if is_gpu(self.device) else None
        self._state = state | {"torch_cuda": self._state["torch_cuda"] if gpu is None else gpu}
