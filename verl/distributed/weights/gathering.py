# SPDX-License-Identifier: Apache-2.0
"""Gather the weights of a sharded model: whole tensors one at a time, stacks of experts in slices.

The joint weight of a layer's experts (experts, ...) may have 15 GiB, as in DeepSeek-V3. It is sharded by
experts, so the ranks that hold some of a slice's experts broadcast them in turn::

    rank                0        1        2        3
    experts          0 1 2    3 4 5    6 7 8     9 10
    slices           0 1 2    3 | 4    5 6 7 |   8 9 10
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.distributed.fsdp import gather_whole, persistent_buffers, sharded_parameters

# Two slices are on the device at once, next to the engine's weights; more would not make gathering faster.
SLICE_BYTES = 1 << 30
SLICE_NAME = re.compile(r"(?P<weight>.+)\[(?P<start>\d+):(?P<stop>\d+)\]")

NamedTensors = Iterable[tuple[str, Tensor]]


class ExpertSlice(NamedTuple):
    """Consecutive experts of a joint weight; a stream of weights names them `weight[start:stop]`."""

    weight: str
    start: int
    stop: int

    @classmethod
    def of(cls, name: str) -> "ExpertSlice | None":
        """Read the name of a tensor; None unless it is that of a slice."""
        found = SLICE_NAME.fullmatch(name)
        return found and cls(found["weight"], int(found["start"]), int(found["stop"]))

    def __str__(self) -> str:
        return f"{self.weight}[{self.start}:{self.stop}]"


def full_named_tensors(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    select: Callable[[str], bool] = lambda _: True,
    stacks: Collection[str] = (),  # names of joint weights that are gathered in slices
    slice_bytes: int = SLICE_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the full tensor of each weight and buffer, gathered one at a time.

    Every rank must iterate to the end, since each tensor is a collective. Names are those of `state_dict()`,
    a tied weight appears once, and `stacks` come as slices (see `ExpertSlice`) of at most `slice_bytes`, or
    of one expert. Floating-point weights are cast to `dtype` before they are gathered; buffers are not, as
    mixed precision leaves them alone.
    """
    buffers = persistent_buffers(model)
    for name, tensor in (sharded_parameters(model) | buffers).items():
        if not select(name):
            continue
        own, wanted = tensor.detach(), None if name in buffers else dtype
        if name not in stacks:
            yield name, _gather(own, wanted)
            continue
        for part in _slices(name, own, wanted, slice_bytes):
            yield str(part), _gather_slice(own, wanted, part)


def in_pieces(named_tensors: NamedTensors, size: int) -> Iterator[tuple[str, Tensor]]:
    """Divide slices of experts into smaller ones of at most `size` bytes, or of one expert."""
    for name, tensor in named_tensors:
        whole_slice = ExpertSlice.of(name)
        if whole_slice is None:
            yield name, tensor
            continue
        weight, start, _ = whole_slice
        for part in _slices(weight, tensor, None, size):
            moved = ExpertSlice(weight, start + part.start, start + part.stop)
            yield str(moved), tensor[part.start : part.stop]


def _slices(name: str, stack: Tensor, dtype: torch.dtype | None, size: int) -> Iterator[ExpertSlice]:
    expert_bytes = math.prod(stack.shape[1:]) * (dtype or stack.dtype).itemsize
    count, step = len(stack), max(1, size // max(1, expert_bytes))
    for start in range(0, count, step):
        yield ExpertSlice(name, start, min(start + step, count))


def _gather(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = _cast(tensor, dtype)
    return gather_whole(tensor) if isinstance(tensor, DTensor) else tensor


def _gather_slice(stack: Tensor, dtype: torch.dtype | None, part: ExpertSlice) -> Tensor:
    if part.stop - part.start == len(stack):
        return _gather(stack, dtype)
    if not isinstance(stack, DTensor):
        return _cast(stack[part.start : part.stop], dtype)
    mesh, place = stack.device_mesh, stack.device_mesh.get_coordinate()
    assert place is not None, "every rank of the mesh gathers"
    wanted = range(part.start, part.stop)
    own = _experts_at(stack, place)
    held = _common(own, wanted)
    gathered = stack.to_local()[held.start - own.start : held.stop - own.start]
    like = torch.empty(0, dtype=dtype or stack.dtype, device=mesh.device_type)
    for axis, placement in enumerate(stack.placements):
        if placement.is_replicate():
            continue
        places = ([*[None] * axis, index, *place[axis + 1 :]] for index in range(mesh.size(axis)))
        counts = [len(_common(_experts_at(stack, each), wanted)) for each in places]
        gathered = _join(gathered, counts, place[axis], mesh.get_group(axis), like)
    return gathered.to(like)


def _experts_at(stack: DTensor, place: Sequence[int | None]) -> range:
    """Return the experts of the rank at a place in the mesh; on axes that are None, of all ranks together."""
    experts, mesh = range(len(stack)), stack.device_mesh
    # Later axes divide first: FSDP shards what expert parallelism leaves on a rank.
    for axis in reversed(range(mesh.ndim)):
        index = place[axis]
        if index is not None and not stack.placements[axis].is_replicate():
            size = -(-len(experts) // mesh.size(axis))
            experts = experts[index * size : (index + 1) * size]
    return experts


def _common(one: range, other: range) -> range:
    start = min(max(one.start, other.start), one.stop)
    return range(start, max(start, min(one.stop, other.stop)))


def _join(part: Tensor, counts: list[int], index: int, group: dist.ProcessGroup, like: Tensor) -> Tensor:
    """Join the parts that the ranks of a group hold, of `counts` experts; this rank's is number `index`.

    The result has the data type and the device of `like`, and is all that is allocated.
    """
    if len(counts) == 1:
        return part
    joined = like.new_empty(sum(counts), *part.shape[1:])
    for source, place in enumerate(joined.split(counts)):
        if source == index:
            place.copy_(part)
        if len(place):
            dist.broadcast(place, group=group, group_src=source)
    return joined


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
