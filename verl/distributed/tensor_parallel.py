# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism of training: ranks that share every layer of a model and run the same rows.

The ranks that share layers are neighbors, since they exchange activations in each of them; ranks with the
same parts shard these further, as FSDP shards whole weights otherwise::

    rank     0  1  2  3  4  5  6  7      tensor_parallel_size 2, fsdp_size 4
    ddp      0  0  0  0  1  1  1  1      replica
    fsdp     0  0  1  1  0  0  1  1      shard of the part
    tp       0  1  0  1  0  1  0  1      part of each layer

A layer that is divided by columns has some of the outputs on each rank, one that is divided by rows some of
the inputs. Between the two nothing is exchanged (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from verl.distributed.fsdp import TENSOR


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of the ranks that share layers; None if every rank runs whole layers."""
    return mesh[TENSOR] if TENSOR in (mesh.mesh_dim_names or ()) else None


def divide(owner: nn.Module, name: str, axis: DeviceMesh, dim: int | None) -> None:
    """Keep this rank's part of a parameter on the meta device: its share of `dim`, or with None a copy."""
    param, place = owner.get_parameter(name), Replicate() if dim is None else Shard(dim)
    size = [length // (axis.size() if number == dim else 1) for number, length in enumerate(param.shape)]
    part = DTensor.from_local(param.new_empty(size), axis, [place], run_check=False)
    owner.register_parameter(name, nn.Parameter(part, requires_grad=param.requires_grad))


def own_part(param: Tensor | None) -> Any:
    """Return this rank's part of a divided parameter; one that the ranks compute alike is as it was."""
    return param.to_local() if isinstance(param, DTensor) else param


def own_copy(param: Tensor) -> Tensor:
    """Return a parameter that each rank applies to its own part: the ranks' gradients are summed."""
    places: list[Placement] = [Partial()]
    return param.to_local(grad_placements=places) if isinstance(param, DTensor) else param


def sum_gradients(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that all ranks have: each runs a part of what follows, and gradients are summed."""
    return _SumGradients.apply(tensor, group)


def sum_parts(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a tensor that each rank has a summand of, in place; the gradient is that of the sum."""
    return _SumParts.apply(tensor, group)


def joined_columns(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the last dimension of all ranks' tensors; without a gradient."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.cat(parts, -1)


class _SumGradients(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = grad.clone(memory_format=torch.contiguous_format)  # others may hold the gradient
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumParts(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
