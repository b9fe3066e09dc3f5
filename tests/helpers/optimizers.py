# SPDX-License-Identifier: Apache-2.0
"""A model with every kind of parameter that optimizers distinguish, and gradients for it."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.optim.schedules import WarmupSchedule

STRATEGIES = ("adamw", "adamw_bf16", "adamw_bf16_sr", "adamw_8bit", "muon")
IN_BF16 = ("adamw_bf16", "adamw_bf16_sr")


def has_torchao() -> bool:
    """Return True if `adamw_8bit` is available."""
    return importlib.util.find_spec("torchao") is not None


needs_torchao = pytest.mark.skipif(not has_torchao(), reason="pip install 'easy-verl[torchao]'")
MARKED_STRATEGIES = [
    pytest.param(one, marks=[needs_torchao] if one == "adamw_8bit" else []) for one in STRATEGIES
]


class Parameters(nn.Module):
    """An embedding, matrices (one shards unevenly over two ranks), stacked experts and a vector."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 256, dtype=dtype)
        self.wide = nn.Linear(256, 17, dtype=dtype)
        self.tall = nn.Linear(16, 40, bias=False, dtype=dtype)
        self.flat = nn.Linear(40, 12, bias=False, dtype=dtype)
        self.square = nn.Linear(24, 24, bias=False, dtype=dtype)
        self.experts = nn.Parameter(torch.empty(4, 8, 192, dtype=dtype))
        self.norm = nn.Parameter(torch.empty(30, dtype=dtype))
        for number, param in enumerate(self.parameters()):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(number))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard in place, as one unit."""
    fully_shard(model, mesh=mesh)
    return model


def whole(tensor: Tensor) -> Tensor:
    """Gather the tensor from all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_values(model: nn.Module) -> dict[str, list]:
    """Return every parameter as numbers."""
    return {name: whole(param.detach()).float().tolist() for name, param in model.named_parameters()}


def gradients(model: nn.Module, step: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each trained parameter with a gradient that depends only on its position and the step."""
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + number)
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if param.requires_grad:
            yield param, grad


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: WarmupSchedule | None, steps: range
) -> None:
    """Run optimizer steps with the gradients of these steps."""
    for step in steps:
        for param, grad in gradients(model, step):
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
