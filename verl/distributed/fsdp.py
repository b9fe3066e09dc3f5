# SPDX-License-Identifier: Apache-2.0
"""Sharded models (FSDP2): meshes, sharding, full tensors, gradient clipping, moving to CPU and back.

The model's parameters are DTensors. Whatever reads them goes through `sharded_parameters`: after a forward
pass FSDP2 may leave gathered parameters in their place.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from torch.optim import Optimizer
from transformers import PreTrainedModel

from verl.distributed.device import empty_cache

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


class ShardOptions(Protocol):
    """What is read here of `worker.*.fsdp`."""

    @property
    def enable_full_shard(self) -> bool:
        """Shard again after forward."""
        ...

    @property
    def enable_cpu_offload(self) -> bool:
        """Keep shards in host memory between uses."""
        ...

    @property
    def mp_param_dtype(self) -> str:
        """Name of the dtype of forward and backward."""
        ...

    @property
    def mp_reduce_dtype(self) -> str:
        """Name of the dtype in which gradients are summed."""
        ...


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a config's name.

    Raises:
        ValueError: The name is none of `DTYPES`.
    """
    if name not in DTYPES:
        raise ValueError(f"a dtype must be one of {sorted(DTYPES)}, got {name!r}")
    return DTYPES[name]


def make_mesh(world_size: int, fsdp_size: int, device: str) -> DeviceMesh:
    """The mesh that a model is sharded over.

    Args:
        world_size: Number of ranks.
        fsdp_size: Ranks that share one copy of the model; -1, or the world size, for all of them. Fewer give
        hybrid
            sharding: copies over the axis "ddp", shards over the axis "fsdp".
        device: "cuda" or "cpu".

    Raises:
        ValueError: `fsdp_size` does not divide the world size.
    """
    if fsdp_size <= 0 or fsdp_size >= world_size:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))
    if world_size % fsdp_size:
        raise ValueError(f"`fsdp.fsdp_size` ({fsdp_size}) must divide the number of processes ({world_size})")
    return init_device_mesh(device, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, config: ShardOptions) -> None:
    """Shard a transformers model in place: each block, vision blocks included, then the rest.

    Args:
        model: On the meta device or not.
        mesh: From `make_mesh`; two axes mean copies of shards.
        config: `worker.*.fsdp`. Without `enable_full_shard` parameters stay gathered from forward to
        backward.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": None if config.enable_full_shard else False,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch_dtype(config.mp_param_dtype), reduce_dtype=torch_dtype(config.mp_reduce_dtype)
        ),
        "offload_policy": offload_policy(config, mesh),
    }
    for block in fsdp_blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)


def fsdp_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """What is gathered at a time: the blocks of the language model and of the vision tower."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def offload_policy(config: ShardOptions, mesh: DeviceMesh) -> OffloadPolicy:
    """Where FSDP2 keeps the shards between uses: `fsdp.enable_cpu_offload` means CPU, of no effect on CPU."""
    return CPUOffloadPolicy() if config.enable_cpu_offload and mesh.device_type == "cuda" else OffloadPolicy()


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter as its shard, by name; a tied parameter stands under its first name only."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's weights, by name."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def full_named_tensors(
    model: nn.Module, dtype: torch.dtype | None = None, select: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole tensor of each weight, gathered one by one.

    Every rank must iterate to the end, in step: each tensor is a collective. Names are those in memory
    (`state_dict()`); `HubNames.convert` turns them into those that engines read. A tied weight comes once,
    under its first name. Works on offloaded models: each shard visits the device on its way.

    Args:
        model: Sharded or not.
        dtype: What floating-point weights are cast to before they are gathered; None keeps theirs.
        select: Which of them are wanted, by their names.
    """
    tensors = sharded_parameters(model) | persistent_buffers(model)
    for name, tensor in tensors.items():
        if select(name):
            yield name, _gather(tensor.detach(), dtype)


def _gather(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return _whole(tensor) if isinstance(tensor, DTensor) else tensor


def _whole(tensor: DTensor) -> Tensor:
    """Gather a tensor over its ranks, on their device."""
    moved = tensor.to(tensor.device_mesh.device_type)
    return moved.full_tensor()  # pyright: ignore[reportAttributeAccessIssue] - `to` of a DTensor gives one


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_shards(tensor: Tensor) -> int:
    """How many ranks share a tensor; copies of its parts (hybrid sharding) are not counted."""
    if not isinstance(tensor, DTensor):
        return 1
    axes = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(axis) for axis, place in axes if place.is_shard())


def shard_index(tensor: Tensor) -> int:
    """Which of the parts of a tensor is this rank's; copies of a part have the same index."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh, index = tensor.device_mesh, 0
    for axis, place in enumerate(tensor.placements):
        if place.is_shard():
            index = index * mesh.size(axis) + mesh.get_local_rank(axis)
    return index


def zeros_beside(tensor: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros whose rows lie where the rows of a tensor lie.

    Args:
        tensor: Sharded by its rows, or not.
        size: As many rows as the tensor has; the rest is free.
        dtype: Of the zeros.
    """
    rows = local_part(tensor).shape[0]
    part = torch.zeros((rows, *size[1:]), dtype=dtype, device=tensor.device)
    if not isinstance(tensor, DTensor):
        return part
    return _sharded_like(part, tensor, torch.Size(size)).to(tensor.device)


def on_whole_matrices(
    function: Callable[[Tensor], Tensor], like: Sequence[Tensor], parts: Sequence[Tensor]
) -> list[Tensor]:
    """Apply a function of a whole matrix to some that are sharded; the ranks share the work.

    Rank i gathers all of them, one after the other, applies the function to the i-th, and sends its rows to
    the ranks that have them. Every rank must call it. Matrices that are not sharded stay where they are.

    Args:
        function: From a matrix to one of its shape and type.
        like: How the matrices are sharded: by rows, over the same ranks; `num_shards` of them at most.
        parts: This rank's rows of each.

    Returns:
        This rank's rows of each result, on the device of the mesh.
    """
    mine: Tensor | None = None
    own, results = shard_index(like[0]), []
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
    """This rank's rows as a tensor that is sharded as another is; on the device of the mesh."""
    stride = tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=size, stride=stride
    )


def _rows_from(source: int, whole: Tensor | None, like: DTensor, dtype: torch.dtype) -> Tensor:
    """This rank's rows of a matrix that the rank of one shard has."""
    mesh = like.device_mesh
    axis = next(axis for axis, place in enumerate(like.placements) if place.is_shard())
    if mesh.ndim > 1:
        assert mesh.mesh_dim_names is not None, "`make_mesh` names the axes"
        mesh = mesh[mesh.mesh_dim_names[axis]]
    if whole is None:
        whole = torch.empty(like.shape, dtype=dtype, device=mesh.device_type)
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=source).to_local()


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their norm over all ranks is at most `max_norm`.

    Waits for every rank. A norm that is not finite leaves gradients of no use: the caller skips the update.

    Args:
        model: After backward.
        max_norm: Largest norm of all gradients together; `inf` only measures.

    Returns:
        The norm before scaling, the same on all ranks.
    """
    grads = [param.grad for param in sharded_parameters(model).values() if param.grad is not None]
    total = get_total_norm(grads)
    norm = (_whole(total) if isinstance(total, DTensor) else total).item()
    if max_norm < norm < float("inf"):
        shards, scale = [local_part(grad) for grad in grads], max_norm / (norm + 1e-6)
        torch._foreach_mul_(shards, scale)  # pyright: ignore[reportPrivateImportUsage] - torch's own code calls it
    return norm


def offload_model(model: nn.Module) -> None:
    """Move shards, their gradients and buffers to host memory, and free the device's."""
    sharded_parameters(model)
    model.to("cpu")
    empty_cache("cuda" if torch.cuda.is_available() else "cpu")


def load_model(model: nn.Module, device: torch.device | str) -> None:
    """Move shards, their gradients and buffers to the device."""
    model.to(device)


def offload_optimizer(optimizer: Optimizer) -> None:
    """Move the optimizer's state to host memory, and free the device's."""
    _move_state(optimizer, "cpu")
    empty_cache("cuda" if torch.cuda.is_available() else "cpu")


def load_optimizer(optimizer: Optimizer, device: torch.device | str) -> None:
    """Move the optimizer's state to the device."""
    _move_state(optimizer, device)


def _move_state(optimizer: Optimizer, device: torch.device | str) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            for key, value in optimizer.state.get(param, {}).items():
                if value.dim() > 0 or group.get(
                    "fused"
                ):  # only fused kernels read step counters on the device
                    optimizer.state[param][key] = value.to(device)


@contextmanager
def loaded_on_device(
    model: nn.Module,
    device: torch.device | str,
    *,
    offload_params: bool,
    optimizer: Optimizer | None = None,
    offload_optimizer_state: bool = False,
) -> Iterator[None]:
    """Have the model, and the optimizer if given, on the device inside the block and offloaded after it.

    Args:
        model: Sharded; with `enable_cpu_offload` FSDP2 moves it by itself, so it must not be moved here.
        device: Where the block works.
        offload_params: `offload.offload_params`; False leaves the model where it is.
        optimizer: The one that steps inside the block, or None.
        offload_optimizer_state: `offload.offload_optimizer`; False leaves its state where it is.
    """
    try:
        if offload_params:
            load_model(model, device)
        if optimizer is not None and offload_optimizer_state:
            load_optimizer(optimizer, device)
        yield
    finally:
        if offload_params:
            offload_model(model)
        if optimizer is not None and offload_optimizer_state:
            offload_optimizer(optimizer)
