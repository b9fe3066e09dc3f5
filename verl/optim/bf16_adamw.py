# SPDX-License-Identifier: Apache-2.0
"""AdamW for weights that are kept in bfloat16.

bfloat16 has 8 bits: a weight of 1 swallows any update below 2^-9. `AnyPrecisionAdamW` keeps what was
swallowed in a second tensor; `StochasticAdamW` rounds at random, so that it is not lost on average. All
arithmetic is float32.
"""

from typing import Any

import torch
from torch import Tensor

from verl.distributed.fsdp import local_part
from verl.optim.local_adamw import LocalAdamW, seed_of_update

DROPPED_BITS = 16  # that float32 has and bfloat16 has not


class AnyPrecisionAdamW(LocalAdamW):
    r"""AdamW that keeps what rounding takes from each weight and adds it to the next update.

    Kahan's summation with a second bfloat16 tensor `c` of each weight:

        m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
        u = c - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p)
        p' = round(p + u)              c' = round(u - (p' - p))

    `m` and `c` have the weight's dtype; `v` is float32, since a bfloat16 `v` never decays (0.999 v rounds
    back to v). So a weight takes 10 bytes instead of the 12 of float32 AdamW with its float32 weight.

    Source: Revisiting BFloat16 Training, algorithm 3 (https://arxiv.org/abs/2010.06192); Decoupled Weight
    Decay Regularization, algorithm 2 (https://arxiv.org/abs/1711.05101).
    """

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
            state["compensation"] = torch.zeros_like(param)
        state["step"] += 1

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
    """AdamW that rounds weights and moments up or down at random, so that they are right on average.

        m = R(b1 m + (1 - b1) g)       v = R(b2 v + (1 - b2) g^2)
        p = R(p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p))

    where the fraction uses the moments before they are rounded, and R(x) is the number of bfloat16 above x
    with the probability that makes its mean x. `m` and `v` are bfloat16: a weight takes 6 bytes. Tensors of
    another type than bfloat16 are not rounded.

    Source: Revisiting BFloat16 Training, algorithm 1 (https://arxiv.org/abs/2010.06192). There moments are
    rounded to the nearest; then v never decays.
    """

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1

        weight, step = local_part(param), state["step"].item()
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        generator = torch.Generator(weight.device).manual_seed(seed_of_update(param, step, number))
        old = weight.float()
        mean, square = _moments(first, second, local_part(grad).float(), group["betas"])
        new = _add_change(old.clone(), old, mean, square, group, step)
        for kept, exact in ((first, mean), (second, square), (weight, new)):
            kept.copy_(stochastic_bf16(exact, generator) if kept.dtype == torch.bfloat16 else exact)


def stochastic_bf16(exact: Tensor, generator: torch.Generator) -> Tensor:
    """Round to one of the two bfloat16 numbers around each number, so that the mean is the number.

    The bits that bfloat16 has not are added to a random number of as many bits: a carry rounds away from
    zero.

    Args:
        exact: float32, of any shape. Infinities stay; a number that bfloat16 has stays.
        generator: On the tensor's device.
    """
    noise = torch.randint(
        0, 1 << DROPPED_BITS, exact.shape, generator=generator, device=exact.device, dtype=torch.int32
    )
    bits = (exact.view(torch.int32) + noise) >> DROPPED_BITS << DROPPED_BITS
    return bits.view(torch.float32).bfloat16()


def _moments(
    first: Tensor, second: Tensor, grad: Tensor, betas: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Both moments after a gradient, float32."""
    mean = first.float().lerp_(grad, 1 - betas[0])
    return mean, (second.float() * betas[1]).addcmul_(grad, grad, value=1 - betas[1])


def _add_change(
    to: Tensor, weight: Tensor, mean: Tensor, square: Tensor, group: dict[str, Any], step: float
) -> Tensor:
    """Add AdamW's update of a weight to a tensor, in place."""
    beta1, beta2 = group["betas"]
    denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    to.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
    return to.add_(weight, alpha=-group["lr"] * group["weight_decay"])
