# SPDX-License-Identifier: Apache-2.0
"""A device that is not the host: moved tensors are other tensors there, and every copied byte is counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from verl.distributed.offload import HostMemory, Offloader, _plain_parts


@dataclass
class Copied:
    """Bytes that went to the device and to the host."""

    to_device: int = 0
    to_host: int = 0


class _Counting(TorchDispatchMode):
    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self.memory, self.copied = memory, Copied()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            places = {place.untyped_storage()._cdata for place in self.memory._places.values()}
            to, source = (tensor.untyped_storage()._cdata in places for tensor in args[:2])
            self.copied.to_host += args[0].nbytes if to else 0
            self.copied.to_device += args[0].nbytes if source and not to else 0
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_copies(offloader: Offloader) -> Iterator[Copied]:
    """Count the bytes of copies to and from the places of an offloader."""
    with _Counting(offloader._memory) as mode:
        yield mode.copied


def size_of(model: nn.Module, *, trained_only: bool = False) -> int:
    """Return the bytes of a model's weights on this rank."""
    params = dict(model.named_parameters())
    return sum(
        part.nbytes
        for part in _plain_parts(
            {(name,): param for name, param in params.items() if param.requires_grad or not trained_only}
        ).values()
    )


def size_of_state(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's tensors that are moved."""
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    return sum(
        part.nbytes
        for param, state in optimizer.state.items()
        for part in _plain_parts(
            {
                (name,): value
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and (value.dim() or groups[param].get("fused"))
            }
        ).values()
    )
