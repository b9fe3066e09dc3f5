# SPDX-License-Identifier: Apache-2.0
"""FSDP2 models: meshes, sharding, full tensors, gradient clipping.

Read parameters through `sharded_parameters`: after a forward pass FSDP2 may leave gathered parameters in
their place.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from verl.distributed.device import is_gpu
from verl.distributed.expert_parallel import shard_experts

TENSOR = "tp"  # axis of a mesh: ranks that share each layer, see `tensor_parallel.py`
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # torch's names


def torch_dtype(name: str) -> torch.dtype:
    if name not in (names := sorted([*DTYPES, *DTYPES.values()])):
        raise ValueError(f"a dtype must be one of {names}, got {name!r}")
    return getattr(torch, DTYPES.get(name, name))


class ShardOptions(Protocol):
    """Options of a section `fsdp` that sharding reads."""

    @property
    def enable_full_shard(self) -> bool: ...
    @property
    def enable_cpu_offload(self) -> bool: ...
    @property
    def mp_param_dtype(self) -> str: ...
    @property
    def mp_reduce_dtype(self) -> str: ...


def make_mesh(world_size: int, fsdp_size: int, device: str, tp_size: int = 1) -> DeviceMesh:
    """Build the device mesh that a model is sharded over.

    `fsdp_size` ranks share one copy of the model; -1 or the world size uses all of them. Fewer ranks give
    hybrid sharding: axes "ddp" of replicas and "fsdp" of shards. `tp_size` neighbors share layers: axis "tp".
    """
    size = fsdp_size if 0 < fsdp_size < world_size else world_size
    if world_size % size:
        raise ValueError(f"`fsdp.fsdp_size` ({fsdp_size}) must divide the number of processes ({world_size})")
    axes = {"ddp": world_size // size, "fsdp": size // tp_size, TENSOR: tp_size}
    names = tuple(name for name, length in axes.items() if length > 1 or name == "fsdp")
    return init_device_mesh(device, tuple(axes[name] for name in names), mesh_dim_names=names)


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    config: ShardOptions,
    *,
    casts_inputs: bool = True,  # cast the inputs of all blocks to the data type of computation
    experts: Sequence[nn.Module] = (),  # modules that `divide_experts` divided
    expert_mesh: DeviceMesh | None = None,  # over which it did
) -> None:
    """Shard a transformers model in place: divided experts, each block, vision blocks included, the rest."""
    options: dict[str, Any] = {
        "mesh": mesh[tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)],
        # False keeps parameters gathered from forward to backward.
        "reshard_after_forward": None if config.enable_full_shard else False,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch_dtype(config.mp_param_dtype),
            reduce_dtype=torch_dtype(config.mp_reduce_dtype),
            cast_forward_inputs=casts_inputs,
        ),
        "offload_policy": offload_policy(config, mesh),
    }
    if expert_mesh is not None:
        shard_experts(experts, expert_mesh, options)
    for block in fsdp_blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)


def fsdp_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that FSDP gathers one at a time: language model and vision blocks."""
    names = set(model._no_split_modules or ())

    def is_block(module: nn.Module) -> bool:
        return type(module).__name__ in names

    # Some models name a whole encoder besides its blocks.
    return [
        module for module in model.modules() if is_block(module) and sum(map(is_block, module.modules())) == 1
    ]


def offload_policy(config: ShardOptions, mesh: DeviceMesh) -> OffloadPolicy:
    # Without a GPU the shards are in host memory anyway.
    return CPUOffloadPolicy() if config.enable_cpu_offload and is_gpu(mesh.device_type) else OffloadPolicy()


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the shard of every parameter by name; a tied parameter appears once."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def gather_whole(tensor: DTensor) -> Tensor:
    """Gather a tensor on the device of its mesh; collective."""
    moved = tensor.to(tensor.device_mesh.device_type)  # for offloaded shards
    return moved.full_tensor()  # pyright: ignore[reportAttributeAccessIssue] - `to` of a DTensor gives one


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor  # shares the tensor's memory


def compute_device(tensor: Tensor) -> torch.device:
    """Return the device of the mesh: FSDP may keep a tensor's shards in host memory."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


def shard_place(tensor: Tensor) -> tuple[int, int]:
    """Return the index of this rank's shard and the number of shards, of which replicas are one."""
    index, count = 0, 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, place in enumerate(tensor.placements):
            if not place.is_replicate():
                index = index * mesh.size(axis) + mesh.get_local_rank(axis)
                count *= mesh.size(axis)
    return index, count


def zeros_sharded_like(tensor: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros with any row shape, sharded by rows as `tensor` is."""
    rows = local_part(tensor).shape[0]
    part = torch.zeros((rows, *size[1:]), dtype=dtype, device=tensor.device)
    if not isinstance(tensor, DTensor):
        return part
    return _sharded_like(part, tensor, torch.Size(size)).to(tensor.device)


def map_full_matrices(
    function: Callable[[Tensor], Tensor],  # keeps shape and dtype
    like: Sequence[Tensor],  # sharded alike, by rows; at most as many as shards
    parts: Sequence[Tensor],  # this rank's rows of each matrix, in the sharding of `like`
) -> list[Tensor]:
    """Apply a function to full matrices that are sharded by rows, with the work shared among the ranks.

    Rank i gathers every matrix in turn, applies the function to the i-th, and sends the result's rows to
    their ranks. Every rank must call it. Returns this rank's rows of each result, on the device of the mesh.
    """
    mine: Tensor | None = None
    own, _ = shard_place(like[0])
    results: list[Tensor] = []
    for number, (part, one) in enumerate(zip(parts, like, strict=True)):
        whole = _sharded_like(part, one, one.shape).full_tensor() if isinstance(one, DTensor) else part
        if number == own:
            mine = function(whole)
    for number, one in enumerate(like):
        if isinstance(one, DTensor):
            results.append(_rows_from(number, mine if number == own else None, one, parts[number].dtype))
        elif mine is not None:
            results.append(mine)
    return results


def _sharded_like(part: Tensor, tensor: DTensor, size: torch.Size) -> DTensor:
    stride = tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=size, stride=stride
    )


def _rows_from(source: int, whole: Tensor | None, like: DTensor, dtype: torch.dtype) -> Tensor:
    """Return this rank's rows of a matrix that only the rank with shard `source` has."""
    mesh = like.device_mesh
    axis = next(axis for axis, place in enumerate(like.placements) if place.is_shard())
    if mesh.ndim > 1:
        assert mesh.mesh_dim_names is not None, "`make_mesh` names the axes"
        mesh = mesh[mesh.mesh_dim_names[axis]]
    if whole is None:
        whole = torch.empty(like.shape, dtype=dtype, device=mesh.device_type)
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=source).to_local()


def sum_over_copies(model: nn.Module, *, now: bool) -> None:
    """Sum gradients over the copies of the weights in the next backward pass, or leave it to a later one."""
    assert isinstance(model, FSDPModule), "only FSDP keeps copies"
    model.set_requires_all_reduce(now)


def check_sums(model: nn.Module) -> None:
    """Raise if gradients were left to a later backward pass, in which their module did not run."""
    waiting = [group._module_fqn for group in _groups(model) if group._partial_reduce_output is not None]
    if waiting:
        raise RuntimeError(f"gradients of {waiting} were not summed over the copies of the weights")


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients to a norm of at most `max_norm` over all ranks; return the norm before scaling.

    Waits for every rank. If the norm is not finite the gradients are useless, and the caller skips the
    update.
    """
    grads = [param.grad for param in sharded_parameters(model).values() if param.grad is not None]
    norm = math.hypot(*(_norm(part) for part in _by_mesh(grads)))
    if max_norm < norm < float("inf"):  # an infinite `max_norm` only measures
        shards, scale = [local_part(grad) for grad in grads], max_norm / (norm + 1e-6)
        torch._foreach_mul_(shards, scale)  # pyright: ignore[reportPrivateImportUsage] - torch's own code calls it
    return norm


def _by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the mesh that they are sharded over: divided experts have one of their own."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _norm(grads: list[Tensor]) -> float:
    total = get_total_norm(grads)
    return (gather_whole(total) if isinstance(total, DTensor) else total).item()


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
    for group in _groups(model):
        own: list[Any] = [param for param in group.fsdp_params if id(param.sharded_param) in kept]
        for param in own:
            param.init_dtype_attrs = partial(_keep, param)
        if any(param.sharded_param.requires_grad for param in own):
            dtype = group.mp_policy.reduce_dtype or torch.float32
            for param in group.fsdp_params:
                param.accumulate_unsharded_grad_if_needed = partial(_accumulate, param, dtype)


def _groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP gathers and reduces at once."""
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            yield group


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
