# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning-rate schedules.

To add an optimizer: one function registered in `OPTIMIZERS`, which receives the parameters and `OptimConfig`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.utils.fsdp_utils import local_part
from verl.utils.registry import Registry

OPTIMIZERS: Registry[Callable[[list[nn.Parameter], Any], Optimizer]] = Registry("optim.strategy")


class OptimOptions(Protocol):
    """What is read here of `worker.actor.optim` and `worker.critic.optim`."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        ...

    @property
    def betas(self) -> tuple[float, float]:
        """Decay of the two moments."""
        ...

    @property
    def weight_decay(self) -> float:
        """Decoupled weight decay."""
        ...

    @property
    def strategy(self) -> str:
        """A name in `OPTIMIZERS`."""
        ...

    @property
    def lr_warmup_ratio(self) -> float:
        """Share of the steps in which the rate rises."""
        ...

    @property
    def lr_warmup_steps(self) -> int | None:
        """Steps in which the rate rises; None for the ratio."""
        ...

    @property
    def min_lr_ratio(self) -> float | None:
        """Where a cosine ends, as a share of the peak; None is 0."""
        ...

    @property
    def lr_scheduler_type(self) -> str:
        """The shape after warm-up: "constant" or "cosine"."""
        ...


@OPTIMIZERS.register("adamw")
def adamw(params: list[nn.Parameter], config: OptimOptions) -> Optimizer:
    """AdamW with one fused kernel for each device."""
    beta1, beta2 = config.betas
    return torch.optim.AdamW(
        params, lr=config.lr, betas=(beta1, beta2), weight_decay=config.weight_decay, fused=True
    )


@OPTIMIZERS.register("adamw_bf16")
def adamw_bf16(params: list[nn.Parameter], config: OptimOptions) -> Optimizer:
    """AdamW for weights that are kept in bfloat16."""
    beta1, beta2 = config.betas
    return AnyPrecisionAdamW(params, lr=config.lr, betas=(beta1, beta2), weight_decay=config.weight_decay)


def build_optimizer(model: nn.Module, config: OptimOptions) -> Optimizer:
    """The optimizer of `optim.strategy` over every parameter of the model that is trained.

    Weight decay applies to all of them, norms and biases included.

    Raises:
        ValueError: Nothing in the model is trained, or the strategy is unknown.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ValueError("the model has no parameter to train: everything is frozen")
    return OPTIMIZERS[config.strategy](params, config)


class AnyPrecisionAdamW(Optimizer):
    r"""AdamW that trains bfloat16 weights without losing small updates.

    bfloat16 has 8 bits: a weight of 1 swallows any update below 2^-9. Kahan's summation keeps what was
    rounded away in a second bfloat16 tensor `c` of each weight and adds it to the next update:

        m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
        u = c - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p)
        p' = round(p + u)              c' = round(u - (p' - p))

    All arithmetic is float32. `m` and `c` have the weight's dtype; `v` is float32, since a bfloat16 `v` never
    decays (0.999 v rounds back to v). So a weight takes 10 bytes instead of the 12 of float32 AdamW with its
    float32 weight.

    Source: Revisiting BFloat16 Training, algorithm 3 (https://arxiv.org/abs/2010.06192); Decoupled Weight
    Decay Regularization, algorithm 2 (https://arxiv.org/abs/1711.05101).

    Args:
        params: Parameters, sharded (DTensor) or not.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Keeps the division finite.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
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
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: nn.Parameter, full_grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
            state["compensation"] = torch.zeros_like(param)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]

        weight, grad = local_part(param), local_part(full_grad).float()
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        compensation = local_part(state["compensation"])

        mean = first.float().lerp_(grad, 1 - beta1)
        first.copy_(mean)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        old = weight.float()
        update = compensation.float().addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
        update.add_(old, alpha=-group["lr"] * group["weight_decay"])
        rounded = (old + update).to(weight.dtype)
        compensation.copy_(update - (rounded.float() - old))
        weight.copy_(rounded)


class WarmupSchedule(LambdaLR):
    """A learning-rate schedule whose checkpoint is its position only.

    The shape comes from the config of the run, so a resumed run may change the learning rate and is heard.
    """

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position and set the learning rates that belong to it."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        rates = [
            base * factor(self.last_epoch)
            for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates


def build_scheduler(optimizer: Optimizer, config: OptimOptions, training_steps: int) -> WarmupSchedule:
    """A linear warm-up from 0, then a constant or half a cosine down to `min_lr_ratio`; stepped once a step.

        warm-up:   lr * step / warmup_steps
        cosine:    lr * (min + (1 - min) * (1 + cos(pi * progress)) / 2),    progress in [0, 1] after the
        warm-up

    Args:
        optimizer: Whose learning rate follows the schedule.
        config: `optim`; `lr_warmup_steps` wins over `lr_warmup_ratio`.
        training_steps: Length of the run, in steps.

    Raises:
        ValueError: `optim.lr_scheduler_type` is unknown.
    """
    if config.lr_scheduler_type not in ("constant", "cosine"):
        raise ValueError(
            f"`optim.lr_scheduler_type` must be one of ['constant', 'cosine'],"
            f" got {config.lr_scheduler_type!r}"
        )
    warmup = config.lr_warmup_steps
    if warmup is None:
        warmup = int(config.lr_warmup_ratio * training_steps)
    lowest = config.min_lr_ratio or 0.0
    is_constant = config.lr_scheduler_type == "constant"

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if is_constant:
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, training_steps - warmup))
        return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))

    return WarmupSchedule(optimizer, factor)
