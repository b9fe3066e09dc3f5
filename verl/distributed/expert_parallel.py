# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: the experts of a layer are divided over ranks, and tokens travel to them.

Ranks that share the experts of a layer are neighbors; each holds as many. Ranks with the same experts shard
them further, as FSDP shards everything else over all ranks::

    rank        0  1  2  3  4  5  6  7      expert_parallel_size 4
    ep          0  1  2  3  0  1  2  3      quarter of the experts
    efsdp       0  0  0  0  1  1  1  1      shard of it

Every rank of a group takes part in each exchange, with any number of rows, zero included. No row is dropped.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from verl.distributed.ulysses import AllToAll

EXPERTS = "ep"  # axis of the mesh


def expert_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Build the mesh of experts that are divided over `size` ranks; collective.

    `mesh` shards the other parameters, see `make_mesh`. The axis "ep" divides the experts, "efsdp" shards
    each part, and "ddp", if `mesh` has it, holds replicas.
    """
    shards = mesh.size(mesh.ndim - 1)
    if shards % size:
        raise ValueError(
            f"`fsdp.expert_parallel_size` ({size}) must divide the {shards} ranks that share one copy of the"
            " weights"
        )
    sizes, names = (shards // size, size), ("efsdp", EXPERTS)
    if mesh.ndim > 1:
        sizes, names = (mesh.size(0), *sizes), ("ddp", *names)
    return init_device_mesh(mesh.device_type, sizes, mesh_dim_names=names)


def divide_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's part of each parameter (experts, ...) of a module on the meta device."""
    axis = mesh[EXPERTS]
    for name, param in list(experts.named_parameters(recurse=False)):
        part = param.new_empty(len(param) // axis.size(), *param.shape[1:])
        divided = DTensor.from_local(part, axis, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(divided, requires_grad=param.requires_grad))


def shard_experts(experts: Sequence[nn.Module], mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Shard divided experts over the ranks that hold the same ones; `options` are those of other modules."""
    assert mesh.mesh_dim_names is not None, "`expert_mesh` names the axes"
    same = mesh[tuple(name for name in mesh.mesh_dim_names if name != EXPERTS)]
    # Routing weights may be in float32 on purpose.
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    for module in experts:
        fully_shard(module, **options | {"mesh": same, "mp_policy": policy})


class Counts(NamedTuple):
    """Rows of an exchange."""

    sent: list[int]  # to each rank
    received: list[int]  # from each rank
    by_expert: Tensor  # (ranks, experts of this rank) int64: received from each rank for each expert


def exchange_counts(chosen: Tensor, num_experts: int, group: dist.ProcessGroup) -> Counts:
    """Tell each rank how many rows its experts get from this one; the host waits for the device.

    Args:
        chosen: (rows,) int64: expert of each row.
    """
    counts = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    ranks = dist.get_world_size(group)
    by_rank = torch.stack([counts, theirs]).view(2, ranks, -1).sum(-1)  # (2, ranks)
    sent, received = by_rank.tolist()
    return Counts(sent, received, theirs.view(ranks, -1))


def send_rows(rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
    """Send rows (sum of sent, ...) to the ranks of their experts; return the rows that arrive, by source.

    Differentiable, and collective like its backward pass.
    """
    return AllToAll.apply(rows, group, counts.sent, counts.received, dist.get_world_size(group))


def return_rows(rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
    """Send results of the rows that arrived back to their sources, in the order in which these sent them."""
    # FSDP averages gradients over the ranks with the same experts, while these get gradients of the tokens of
    # all ranks, which are averaged everywhere else: inside the experts they are that much smaller.
    return AllToAll.apply(rows, group, counts.received, counts.sent, 1 / dist.get_world_size(group))
