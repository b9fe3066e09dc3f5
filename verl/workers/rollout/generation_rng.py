# SPDX-License-Identifier: Apache-2.0
"""Separate random streams for training and sampling in one process.

Engines draw from the global generators of torch, CUDA, numpy and Python, as training does. `GenerationRng`
keeps a second set of states and swaps the two around generation. Ranks of one tensor-parallel group must hold
equal streams, or they sample different tokens without any error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.distributed.device import GPU_STATE, is_gpu, random_state, set_random_state, set_seed

OLD_NAMES = {"torch_cpu": "torch", "torch_cuda": GPU_STATE}  # in the checkpoints of earlier versions


@contextmanager
def preserved_rng(device: str) -> Iterator[None]:
    """Restore the global generators after the block."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before)


class GenerationRng:
    """The random stream of sampling."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        with preserved_rng(device):
            set_seed(seed)  # of all GPUs as well
            self._state = random_state(device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        with preserved_rng(self.device):
            set_random_state(self._state)
            try:
                yield
            finally:
                self._state = random_state(self.device)

    def state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`."""
        state = {OLD_NAMES.get(name, name): value for name, value in state.items()}
        gpu = state[GPU_STATE] if is_gpu(self.device) else None
        self._state = state | {GPU_STATE: self._state[GPU_STATE] if gpu is None else gpu}
