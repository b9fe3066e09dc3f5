# SPDX-License-Identifier: Apache-2.0
"""What optimizers share that update each parameter apart, every rank its own part of it."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from verl.distributed.fsdp import shard_index


class LocalAdamW(Optimizer):
    """AdamW, parameter by parameter; a subclass says how one is updated.

    Args:
        params: Parameters or groups of them, sharded (DTensor) or not.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Keeps the division finite.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss anew, with gradients; None if they are there already.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        for group in self.param_groups:
            for param in group["params"]:
                number += 1
                if param.grad is not None:
                    self._update(param, param.grad, group, number)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        """Update this rank's part of a parameter, the `number`-th of the optimizer, and its state."""
        raise NotImplementedError


def seed_of_update(param: Tensor, step: float, number: int) -> int:
    """A seed for the random numbers of one update of one part of a parameter.

    It follows from what a checkpoint holds: a resumed run draws what the unbroken one draws, and ranks with
    copies of a part (hybrid sharding) draw alike, so that the copies stay equal.
    """
    text = f"{int(step)} {number} {shard_index(param)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
