# SPDX-License-Identifier: Apache-2.0
"""The optimizers that `optim.strategy` selects among.

To add an optimizer: one function registered in `OPTIMIZERS`. It receives the model, which it may look at, its
parameter groups, each with its learning rate, and `OptimConfig`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from verl.optim.bf16_adamw import AnyPrecisionAdamW, StochasticAdamW
from verl.optim.groups import parameter_groups
from verl.optim.muon import Muon, layer_matrices
from verl.utils.rank_logger import get_logger
from verl.utils.registry import Registry

logger = get_logger(__name__)

Groups = list[dict[str, Any]]


class OptimOptions(Protocol):
    """What is read here of `worker.actor.optim` and `worker.critic.optim`."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        ...

    @property
    def lr_factors(self) -> Mapping[str, float]:
        """Factor of the rate by a regular expression found in names of parameters."""
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


OPTIMIZERS: Registry[Callable[[nn.Module, Groups, OptimOptions], Optimizer]] = Registry("optim.strategy")


@OPTIMIZERS.register("adamw")
def adamw(model: nn.Module, groups: Groups, config: OptimOptions) -> Optimizer:
    """AdamW with one fused kernel for each device."""
    return torch.optim.AdamW(groups, betas=config.betas, weight_decay=config.weight_decay, fused=True)


@OPTIMIZERS.register("adamw_bf16")
def adamw_bf16(model: nn.Module, groups: Groups, config: OptimOptions) -> Optimizer:
    """AdamW for bfloat16 weights that keeps what rounding takes."""
    return AnyPrecisionAdamW(groups, betas=config.betas, weight_decay=config.weight_decay)


@OPTIMIZERS.register("adamw_bf16_sr")
def adamw_bf16_sr(model: nn.Module, groups: Groups, config: OptimOptions) -> Optimizer:
    """AdamW for bfloat16 weights and moments that rounds stochastically."""
    return StochasticAdamW(groups, betas=config.betas, weight_decay=config.weight_decay)


@OPTIMIZERS.register("adamw_8bit")
def adamw_8bit(model: nn.Module, groups: Groups, config: OptimOptions) -> Optimizer:
    """AdamW with 8-bit moments; needs torchao, which `OptimConfig` checks."""
    from verl.optim.adamw_8bit import AdamW8bit  # noqa: PLC0415 - torchao is optional

    return AdamW8bit(groups, betas=config.betas, weight_decay=config.weight_decay)


@OPTIMIZERS.register("muon")
def muon(model: nn.Module, groups: Groups, config: OptimOptions) -> Optimizer:
    """Muon for the matrices of layers, AdamW for the rest."""
    return Muon(groups, layer_matrices(model), config.betas, config.weight_decay)


def build_optimizer(model: nn.Module, config: OptimOptions, option: str = "optim") -> Optimizer:
    """The optimizer of `optim.strategy` over every parameter of the model that is trained.

    Weight decay applies to all of them, norms and biases included. The first group has the rate `lr`.

    Args:
        model: `requires_grad` says what is trained; what is frozen has no state.
        config: `worker.*.optim`.
        option: Where it stands in the config, for errors.

    Raises:
        ValueError: Nothing in the model is trained, a pattern of `lr_factors` is found in no trained
            parameter's name, or the strategy is unknown.
    """
    make = OPTIMIZERS[config.strategy]
    groups = parameter_groups(model, config.lr, config.lr_factors, option)
    for group in groups:
        logger.info(
            "one learning rate: option=%s strategy=%s pattern=%s lr=%g tensors=%d parameters=%d",
            option, config.strategy, group["pattern"], group["lr"],
            len(group["params"]), sum(param.numel() for param in group["params"]),
        )  # fmt: skip
    return make(model, groups, config)
