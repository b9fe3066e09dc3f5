# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture that are divided over ranks: each token travels to the ranks with its experts.

A module of experts is one of transformers' interface: joint parameters (experts, ...), and a forward pass of
tokens, their experts and weights. Its own forward pass runs on the rows that arrive, with whichever
implementation its config chooses: grouped products on GPUs.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.distributed.expert_parallel import (
    EXPERTS,
    divide_experts,
    exchange_counts,
    expert_mesh,
    return_rows,
    send_rows,
)
from verl.models.lora import adapted_parameters, joint_experts
from verl.models.lora_weights import JOINT

INTERFACE = ("num_experts", "is_transposed", "has_gate", "has_bias")  # what transformers' interface sets


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of joint experts with transformers' interface; none for a dense model."""
    return [module for module in model.modules() if all(hasattr(module, name) for name in INTERFACE)]


def divisible_experts(model: PreTrainedModel) -> int:
    """Return the experts of each layer, or what divides the experts of all; 0 if they must stay whole."""
    return 0 if _adapted(model) else math.gcd(*map(_count, expert_modules(model)))


def check_divisible(model: PreTrainedModel, size: int, option: str) -> None:
    """Raise a ValueError unless the experts of a model can be divided over `size` ranks.

    `option` is the key of `expert_parallel_size`.
    """
    experts, name = expert_modules(model), type(model).__name__
    if not experts:
        joint = joint_experts(model)
        reason = f"has experts ({joint[0]}) without transformers' interface" if joint else "has no experts"
        raise ValueError(f"`{option}` ({size}) must be 1 for {name}, which {reason}")
    uneven = next((count for count in map(_count, experts) if count % size), None)
    if uneven is not None:
        divisors = [number for number in range(1, size) if uneven % number == 0]
        raise ValueError(
            f"`{option}` ({size}) must divide the {uneven} experts of a layer of {name}: set it to"
            f" {divisors[-1]}"
        )
    if adapted := _adapted(model):
        raise ValueError(
            f"`{option}` ({size}) must be 1 with adapters on experts ({adapted[0]}): remove them from"
            " `lora.target_parameters`; adapters on other modules are possible"
        )


def _adapted(model: PreTrainedModel) -> list[str]:
    return [each.name for each in adapted_parameters(model) if ".experts." in each.name]


def has_biases(model: nn.Module) -> bool:
    """Return whether experts have biases, which are joined to matrices (experts, out)."""
    return any(param.ndim < JOINT for module in expert_modules(model) for param in module.parameters())


def expert_option(model_option: str) -> str:
    """Return the key of `expert_parallel_size` of a model, such as `worker.actor.model` or a teacher."""
    return f"{model_option.removesuffix('.model')}.fsdp.expert_parallel_size"


def _count(module: nn.Module) -> int:
    return int(module.num_experts)  # pyright: ignore[reportArgumentType] - of transformers' interface


def divide_over_ranks(
    model: PreTrainedModel, mesh: DeviceMesh, size: int
) -> tuple[list[nn.Module], DeviceMesh]:
    """Divide the experts of a model on the meta device; return the modules and their mesh. Collective."""
    experts, divided = expert_modules(model), expert_mesh(mesh, size)
    for module in experts:
        divide_experts(module, divided)
        module.__class__ = _divided(type(module))
        vars(module)["expert_group"] = divided.get_group(EXPERTS)
    return experts, divided


@functools.cache
def _divided(original: type[nn.Module]) -> type[nn.Module]:
    @torch.compiler.disable
    def forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run tokens (n, H) through their experts (n, k) and return sums (n, H) weighted by (n, k)."""
        flat, group = chosen.flatten(), self.expert_group  # (n * k,)
        order = flat.argsort(stable=True)
        counts = exchange_counts(flat, self.num_experts, group)
        rows = send_rows(hidden[order // chosen.shape[-1]], counts, group)
        results = _run(original, self, rows, counts.by_expert)  # (M, H)
        results = return_rows(results, counts, group)  # (n * k, H)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        weighted = results[places].view(*chosen.shape, hidden.shape[-1]) * weights[..., None]  # (n, k, H)
        return weighted.sum(1).to(hidden.dtype)

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


def _run(original: type[nn.Module], module: nn.Module, rows: Tensor, by_expert: Tensor) -> Tensor:
    """Run rows (M, H) through this rank's experts; they arrived as `by_expert` (ranks, experts) counts."""
    arrived, experts = len(rows), by_expert.shape[-1]
    ends = by_expert.flatten().cumsum(0)
    chosen = torch.bucketize(torch.arange(arrived, device=rows.device), ends, right=True) % experts  # (M,)
    if not arrived:  # FSDP sums gradients that every rank must have, and the exchange goes back
        rows, chosen = torch.cat([rows, rows.new_zeros(1, rows.shape[-1])]), chosen.new_zeros(1)
    own = _OwnExperts(module, experts)
    return original.forward(own, rows, chosen[:, None], rows.new_ones(len(rows), 1))[:arrived]  # pyright: ignore[reportArgumentType] - reads as a module


class _OwnExperts:
    """A module of experts as its own forward pass sees it: with this rank's experts only."""

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        self._module, self.num_experts = module, num_experts
        for name, param in module.named_parameters(recurse=False):
            setattr(self, name, param.to_local() if isinstance(param, DTensor) else param)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
