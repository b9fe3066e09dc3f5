# SPDX-License-Identifier: Apache-2.0
"""Offloading: weights and optimizer state wait in host memory while they are not used.

Each tensor has one place in host memory, allocated once and page-locked for CUDA: copies through pageable
memory are several times slower. Only an update changes weights on the device, so nothing else is copied back.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verl.distributed.device import empty_cache, host_buffer, synchronize
from verl.distributed.fsdp import sharded_parameters

HOST = torch.device("cpu")
ALIGNMENT = 64  # bytes between the starts of two places

Key = tuple[Hashable, ...]
Move = Callable[[Key, Tensor], Tensor]


class HostMemory:
    """The places of plain tensors in host memory, and their copies to and from one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._places: dict[Key, Tensor] = {}
        self._on_device: set[Key] = set()  # loaded from their places

    def reserve(self, tensors: Mapping[Key, Tensor]) -> None:
        """Allocate places for those tensors that have none, in one buffer."""
        new = {key: tensor for key, tensor in tensors.items() if not self._has_place(key, tensor)}
        starts, total = [], 0
        for tensor in new.values():
            starts.append(total)
            total += -(-max(1, tensor.nbytes) // ALIGNMENT) * ALIGNMENT  # ranks may hold empty shards
        if not new:
            return
        buffer = host_buffer(total, self.device, self)
        for (key, tensor), start in zip(new.items(), starts, strict=True):
            part = buffer[start : start + tensor.nbytes]
            self._places[key] = part.view(tensor.dtype).view(tensor.shape)
            self._on_device.discard(key)

    def offload(self, key: Key, tensor: Tensor, *, has_changed: bool) -> Tensor:
        """Return the tensor's place, with its values; without `has_changed` a loaded tensor is not copied."""
        if not self._has_place(key, tensor):
            self.reserve({key: tensor})
        place = self._places[key]
        if (has_changed or key not in self._on_device) and not _is_same_memory(tensor, place):
            place.copy_(tensor, non_blocking=True)
        self._on_device.discard(key)
        return place

    def load(self, key: Key, tensor: Tensor) -> Tensor:
        """Return the tensor on the device; one that was replaced meanwhile is copied to its place first."""
        if key in self._on_device:
            return tensor
        if not self._has_place(key, tensor):
            return tensor.to(self.device)
        place = self._places[key]
        if not _is_same_memory(tensor, place):
            place.copy_(tensor)
        self._on_device.add(key)
        return torch.empty_like(place, device=self.device).copy_(place, non_blocking=True)

    def _has_place(self, key: Key, tensor: Tensor) -> bool:
        place = self._places.get(key)
        return place is not None and place.shape == tensor.shape and place.dtype == tensor.dtype


class Offloader:
    """Moves a model and its optimizer between a device and host memory.

    Where neither is offloaded, for example on CPU, blocks copy nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str,
        *,
        optimizer: Optimizer | None = None,
        offloads_weights: bool,
        offloads_state: bool = False,  # of the optimizer
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.offloads_weights, self.offloads_state = offloads_weights, offloads_state
        self._memory = HostMemory(device)

    @contextmanager
    def loaded(self, *, with_optimizer: bool = False) -> Iterator[None]:
        """Keep the model on the device inside the block, and with `with_optimizer` the optimizer's state.

        Weights may change in a block with the optimizer only. After the block nothing is gathered.
        """
        try:
            if self.offloads_weights:
                self._move_weights(self._memory.device, self._memory.load)
            if with_optimizer and self.offloads_state:
                self._move_state(self._memory.load)
            yield
        finally:
            self._offload(has_changed=with_optimizer)

    def settle(self) -> None:
        """Move tensors that were replaced, for example by a checkpoint, to where they wait between blocks."""
        if self.offloads_weights and not self.offloads_state:
            # they were allocated next to the weights, in host memory
            self._move_state(lambda key, tensor: tensor.to(self._memory.device))
        self._offload(has_changed=False)

    def _offload(self, *, has_changed: bool) -> None:
        # FSDP leaves the embeddings and the head gathered after a pass without gradients.
        weights = sharded_parameters(self.model)
        memory = self._memory
        if self.offloads_weights:
            memory.reserve(_plain_parts({("weight", name): param for name, param in weights.items()}))
            trained = {("weight", name) for name, param in weights.items() if param.requires_grad}

            def leave(key: Key, tensor: Tensor) -> Tensor:
                return memory.offload(key, tensor, has_changed=has_changed and key[:2] in trained)

            self._move_weights(HOST, leave)
        if self.offloads_state:
            memory.reserve(_plain_parts({key: value for key, _, value in self._state()}))
            self._move_state(lambda key, tensor: memory.offload(key, tensor, has_changed=has_changed))
        if self.offloads_weights or self.offloads_state:
            synchronize(memory.device.type)  # the copies are complete before the host reads them
            empty_cache(memory.device)

    def _move_weights(self, to: torch.device, move: Move) -> None:
        weights = sharded_parameters(self.model)
        moved = {id(param): _rebuilt(("weight", name), param, move) for name, param in weights.items()}
        if to == HOST:  # FSDP pads uneven shards as soon as they are replaced, and reads them for it
            synchronize(self._memory.device.type)

        def moved_tensor(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):  # a buffer or a gradient
                return tensor.to(to)
            return moved.pop(id(tensor), tensor)  # a tied weight comes twice

        self.model._apply(moved_tensor)  # as `Module.to` does; FSDP follows it

    def _move_state(self, move: Move) -> None:
        for key, state, value in list(self._state()):
            state[key[-1]] = _rebuilt(key, value, move)

    def _state(self) -> Iterator[tuple[Key, dict[Any, Any], Tensor]]:
        """Yield the tensors of the optimizer that belong on the device, with the dictionaries they are in."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                state = self.optimizer.state.get(param, {}) if self.optimizer is not None else {}
                for name, value in state.items():
                    # Only fused kernels read step counters on the device.
                    if isinstance(value, Tensor) and (value.dim() > 0 or group.get("fused")):
                        yield ("state", number, index, name), state, value


def _plain_parts(tensors: Mapping[Key, Any]) -> dict[Key, Tensor]:
    """Return the plain tensors that sharded or quantized ones consist of."""
    parts: dict[Key, Tensor] = {}
    for key, tensor in tensors.items():
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts |= _plain_parts({(*key, name): getattr(tensor, name) for name in names})
        elif isinstance(tensor, Tensor):  # newer torch also names the mesh of a sharded tensor
            parts[key] = tensor
    return parts


def _rebuilt(key: Key, tensor: Any, move: Move) -> Any:
    """Return the same tensor of plain tensors that were moved."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        parts = {name: _rebuilt((*key, name), getattr(tensor, name), move) for name in names}
        return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return move(key, tensor.detach()) if isinstance(tensor, Tensor) else tensor


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    # not by `data_ptr`, which tensors without values lack
    storages = (one.untyped_storage()._cdata, other.untyped_storage()._cdata)
    return storages[0] == storages[1] and one.storage_offset() == other.storage_offset()
