# SPDX-License-Identifier: Apache-2.0
"""Parameters kept in float32 under mixed precision, because a model computes with them in float32."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


def keep_float32(model: nn.Module, parts: Collection[str]) -> None:
    """Have FSDP gather some parameters of a sharded model in float32, whatever it computes in.

    A policy of FSDP2 holds for every parameter of a module, and a single parameter is not a module. A block's
    gradients are reduced in one collective, hence in one data type: where some are in float32 because their
    parameters are, all are cast to that of the reduction first.

    Args:
        parts: Components of the names of modules and parameters, such as `norm2` of `blocks.0.norm2.weight`.
    """
    kept = {
        id(param) for name, param in model.named_parameters() if not set(parts).isdisjoint(name.split("."))
    }
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None:
            continue
        own: list[Any] = [param for param in group.fsdp_params if id(param.sharded_param) in kept]
        for param in own:
            param.init_dtype_attrs = partial(_keep, param)
        if any(param.sharded_param.requires_grad for param in own):
            dtype = group.mp_policy.reduce_dtype or torch.float32
            for param in group.fsdp_params:
                param.accumulate_unsharded_grad_if_needed = partial(_accumulate, param, dtype)


def _keep(param: Any, policy: MixedPrecisionPolicy) -> None:
    """Set the data types of a parameter, as FSDP does at the first forward pass."""
    type(param).init_dtype_attrs(param, policy)
    if param.orig_dtype == torch.float32:
        param.param_dtype = None  # no cast


def _accumulate(param: Any, dtype: torch.dtype) -> None:
    """Add a new gradient, cast, to the earlier ones that were not reduced yet."""
    if not hasattr(param, "_unsharded_param") or param.unsharded_param.grad is None:
        return
    grad, param.unsharded_param.grad = param.unsharded_param.grad.to(dtype), None
    earlier = param.unsharded_accumulated_grad
    param.unsharded_accumulated_grad = grad if earlier is None else earlier + grad
