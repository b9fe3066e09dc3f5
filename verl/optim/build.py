# SPDX-License-Identifier: Apache-2.0
"""The optimizers of `optim.strategy`, and their parameter groups.

To add an optimizer, register a function in `OPTIMIZERS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from verl.optim.adamw import AnyPrecisionAdamW, StochasticAdamW
from verl.optim.muon import Muon, layer_matrices
from verl.utils.rank_logger import get_logger
from verl.utils.registry import Registry

if TYPE_CHECKING:  # optimizers are built without a config file too, and need no YAML reader
    from verl.config.model import OptimConfig

logger = get_logger(__name__)

Groups = list[dict[str, Any]]


# Functions of the model, its parameter groups, each with a learning rate, and the options.
OPTIMIZERS: Registry[Callable[[nn.Module, Groups, OptimConfig], Optimizer]] = Registry("optim.strategy")


@OPTIMIZERS.register("adamw")
def adamw(model: nn.Module, groups: Groups, config: OptimConfig) -> Optimizer:
    return torch.optim.AdamW(groups, betas=config.betas, weight_decay=config.weight_decay, fused=True)


@OPTIMIZERS.register("adamw_bf16")
def adamw_bf16(model: nn.Module, groups: Groups, config: OptimConfig) -> Optimizer:
    return AnyPrecisionAdamW(groups, betas=config.betas, weight_decay=config.weight_decay)


@OPTIMIZERS.register("adamw_bf16_sr")
def adamw_bf16_sr(model: nn.Module, groups: Groups, config: OptimConfig) -> Optimizer:
    return StochasticAdamW(groups, betas=config.betas, weight_decay=config.weight_decay)


@OPTIMIZERS.register("adamw_8bit")
def adamw_8bit(model: nn.Module, groups: Groups, config: OptimConfig) -> Optimizer:
    from verl.optim.adamw_8bit import AdamW8bit  # noqa: PLC0415 - torchao is optional; `OptimConfig` checks

    return AdamW8bit(groups, betas=config.betas, weight_decay=config.weight_decay)


@OPTIMIZERS.register("muon")
def muon(model: nn.Module, groups: Groups, config: OptimConfig) -> Optimizer:
    return Muon(groups, layer_matrices(model), config.betas, config.weight_decay)


def build_optimizer(model: nn.Module, config: OptimConfig, option: str = "optim") -> Optimizer:
    """Build the optimizer of `optim.strategy` over every trained parameter, norms and biases included.

    `option` is the config section named in errors.
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


def parameter_groups(
    model: nn.Module,  # may be on the meta device
    lr: float,
    factors: Mapping[str, float],  # `lr_factors`
    option: str,  # config section, for errors
) -> Groups:
    """Divide the trained parameters by the first pattern found in their names; the first group has none."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not trained:
        raise ValueError("the model has no parameter to train: everything is frozen")
    # The first group exists even if the others take all parameters: its rate is the reported one.
    groups: Groups = [{"params": [], "lr": lr, "pattern": None}]
    groups += [{"params": [], "lr": lr * factor, "pattern": pattern} for pattern, factor in factors.items()]
    for name, param in trained.items():
        found = (group for group in groups[1:] if re.search(group["pattern"], name))
        next(found, groups[0])["params"].append(param)
    for group in groups[1:]:
        if not group["params"]:
            pattern = group["pattern"]
            raise ValueError(f"`{option}.lr_factors` ({pattern}) {_why_unused(model, pattern)}")
    return groups


def _why_unused(model: nn.Module, pattern: str) -> str:
    named = dict(model.named_parameters())
    found = [name for name in named if re.search(pattern, name)]
    if not found:
        return f"must match part of a parameter's name, for example {next(iter(named))}"
    if not any(named[name].requires_grad for name in found):
        return f"must match a trained parameter, but {found[0]} and all others that it matches are frozen"
    return f"must come before the patterns that match all of its parameters, such as {found[0]}"
