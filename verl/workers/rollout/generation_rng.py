# SPDX-License-Identifier: Apache-2.0
"""Separate random streams for training and sampling in one process.

Engines draw from the global generators of torch, CUDA, numpy and Python, as training does. `GenerationRng`
keeps a second set of states and swaps the two around generation. Ranks of one tensor-parallel group must hold
equal streams, or they sample different tokens without any error.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.distributed.device import gpu_random_state, is_gpu, set_gpu_random_state


class GlobalRngState(NamedTuple):
    """States of all global generators; of GPUs' only the current device's."""

    torch_cpu: Tensor
    torch_gpu: Tensor | None
    numpy: Any  # a tuple in numpy's legacy form
    python: tuple[Any, ...]


def capture(device: str) -> GlobalRngState:
    gpu = gpu_random_state() if is_gpu(device) else None
    return GlobalRngState(torch.get_rng_state(), gpu, np.random.get_state(), random.getstate())


def restore(state: GlobalRngState) -> None:
    torch.set_rng_state(state.torch_cpu)
    set_gpu_random_state(state.torch_gpu)
    np.random.set_state(state.numpy)
    random.setstate(state.python)


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
            torch.manual_seed(seed)  # all GPUs as well
            np.random.seed(seed % 2**32)
            random.seed(seed)
            self._state = capture(device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        training = capture(self.device)
        restore(self._state)
        try:
            yield
        finally:
            self._state = capture(self.device)
            restore(training)

    def state(self) -> dict[str, Any]:
        """The state as tensors, numbers and lists, which `torch.load(weights_only=True)` reads."""
        name, keys, *position = self._state.numpy
        version, words, gauss = self._state.python
        return {
            "torch_cpu": self._state.torch_cpu.clone(),
            # the name is that of earlier checkpoints
            "torch_cuda": None if self._state.torch_gpu is None else self._state.torch_gpu.clone(),
            "numpy": [name, keys.tolist(), *position],
            "python": [version, list(words), gauss],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`."""
        name, keys, *position = state["numpy"]
        version, words, gauss = state["python"]
        gpu = state["torch_cuda"] if is_gpu(self.device) else None
        self._state = GlobalRngState(
            torch_cpu=state["torch_cpu"],
            torch_gpu=self._state.torch_gpu if gpu is None else gpu,
            numpy=(name, np.array(keys, dtype=np.uint32), *position),
            python=(version, tuple(words), gauss),
        )
