# SPDX-License-Identifier: Apache-2.0
"""AdamW for bfloat16 weights, and the base class of optimizers that update each shard independently.

bfloat16 has 8 bits: a weight of 1 loses any update below 2^-9. All arithmetic here is float32.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from verl.distributed.fsdp import local_part, shard_place

DROPPED_BITS = 16  # float32 bits that bfloat16 lacks


class LocalAdamW(Optimizer):
    """AdamW that updates this rank's shard of one parameter at a time; subclasses implement `_update`."""

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
    def step(self, closure: None = None) -> None:
        pairs = [(group, param) for group in self.param_groups for param in group["params"]]
        for number, (group, param) in enumerate(pairs, start=1):
            if param.grad is not None:
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    self._start(param, state)
                state["step"] += 1
                self._update(param, param.grad, group, number)

    def _start(self, param: Tensor, state: dict[str, Tensor]) -> None:
        """Add the zero moments of a parameter to its state."""
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        raise NotImplementedError


def seed_of_update(param: Tensor, step: float, number: int) -> int:
    # The seed follows from the contents of a checkpoint: a resumed run draws the same numbers. So do replicas
    # of a shard (hybrid sharding), which therefore stay equal.
    text = f"{int(step)} {number} {shard_place(param)[0]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


class AnyPrecisionAdamW(LocalAdamW):
    r"""AdamW that adds the rounding error of each weight to its next update (Kahan summation).

        m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
        u = c - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p)
        p' = round(p + u)              c' = round(u - (p' - p))

    Source: Revisiting BFloat16 Training, algorithm 3 (https://arxiv.org/abs/2010.06192); Decoupled Weight
    Decay Regularization, algorithm 2 (https://arxiv.org/abs/1711.05101).
    """

    def _start(self, param: Tensor, state: dict[str, Tensor]) -> None:
        state["exp_avg"] = torch.zeros_like(param)
        # float32, since a bfloat16 second moment never decays: 0.999 v rounds back to v.
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        state["compensation"] = torch.zeros_like(param)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[param]
        weight, compensation = local_part(param), local_part(state["compensation"])
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        old = weight.float()
        mean, square = _moments(first, second, local_part(grad).float(), group["betas"])
        first.copy_(mean)
        second.copy_(square)
        update = _add_change(compensation.float(), old, mean, square, group, state["step"].item())
        rounded = (old + update).to(weight.dtype)
        compensation.copy_(update - (rounded.float() - old))
        weight.copy_(rounded)


class StochasticAdamW(LocalAdamW):
    """AdamW that rounds weights and moments at random, so that they are correct on average.

        m = R(b1 m + (1 - b1) g)       v = R(b2 v + (1 - b2) g^2)
        p = R(p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p))

    where the fraction uses the unrounded moments, and R rounds bfloat16 tensors only.

    Source: Revisiting BFloat16 Training, algorithm 1 (https://arxiv.org/abs/2010.06192), which rounds moments
    to nearest; v then never decays.
    """

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[param]
        weight, step = local_part(param), state["step"].item()
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        generator = torch.Generator(weight.device).manual_seed(seed_of_update(param, step, number))
        old = weight.float()
        mean, square = _moments(first, second, local_part(grad).float(), group["betas"])
        new = _add_change(old.clone(), old, mean, square, group, step)
        for kept, exact in ((first, mean), (second, square), (weight, new)):
            kept.copy_(stochastic_bf16(exact, generator) if kept.dtype == torch.bfloat16 else exact)


def stochastic_bf16(exact: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to one of the two nearest bfloat16 numbers, so that the expectation is exact."""
    # Add random low bits, then truncate: a carry rounds away from zero. Exact numbers and infinities stay.
    noise = torch.randint(
        0, 1 << DROPPED_BITS, exact.shape, generator=generator, device=exact.device, dtype=torch.int32
    )
    bits = (exact.view(torch.int32) + noise) >> DROPPED_BITS << DROPPED_BITS
    return bits.view(torch.float32).bfloat16()


def _moments(
    first: Tensor, second: Tensor, grad: Tensor, betas: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    mean = first.float().lerp_(grad, 1 - betas[0])
    return mean, (second.float() * betas[1]).addcmul_(grad, grad, value=1 - betas[1])


def _add_change(
    to: Tensor, weight: Tensor, mean: Tensor, square: Tensor, group: dict[str, Any], step: float
) -> Tensor:
    beta1, beta2 = group["betas"]
    denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    to.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
    return to.add_(weight, alpha=-group["lr"] * group["weight_decay"])
