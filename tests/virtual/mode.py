# SPDX-License-Identifier: Apache-2.0
"""Operations on a virtual GPU: shapes, types, devices and memory as on a real one, without values.

Tensors in host memory are real. Integers on the device keep their values too, next to the fake tensor, for
as long as they follow from integers of the host: lengths and indices. A read of one is counted, and a read of
any other integer, which no one can know here, is an error.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import get_process_group_ranks
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from tests.virtual.device import TYPE
from tests.virtual.tally import Collective, Tally
from verl.models.head import triton_softmax

READING = 2.0  # every floating-point number that is read from the device
MAX_VALUES = 1 << 22  # elements of integer tensors whose values are kept
PLAIN = {Tensor, nn.Parameter, nn.Buffer, FakeTensor}

PRIM_DEVICE = torch.ops.prim.device.default
NO_BACKWARD = -1

aten: Any = torch.ops.aten
# The host waits for the device to learn the size of a result, or a value.
WAITING = {
    aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor, aten.bincount.default,
    aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default, aten.equal.default,
    aten._local_scalar_dense.default,
}  # fmt: skip
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
COPYING = {aten._to_copy.default, aten.copy_.default}
PINNING = {aten._pin_memory.default, aten.pin_memory.default}


class UnknownValueError(RuntimeError):
    """The host asked for a value that only a real device has."""


class VirtualGPU(TorchDispatchMode):
    """Runs operations on tensors of the device `vgpu` without values, all others as they are."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        # torch ends the process where an exception leaves a backward pass on a device made in Python
        self.on_error: Callable[[Exception], None] = lambda error: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is PRIM_DEVICE:  # by far the most frequent
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        try:
            return self._dispatch(func, types, args, kwargs or {})
        except Exception as error:
            if torch._C._current_graph_task_id() != NO_BACKWARD:
                self.on_error(error)
            raise

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not PLAIN.issuperset(types):
            return NotImplemented  # a DTensor: its operations on shards follow
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor computes the shape of a whole result
        leaves = _leaves(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func in PINNING:
            return self._pinned(args[0])
        if not self._is_virtual(tensors, kwargs):
            if func.namespace == "c10d":
                return self._collective(func, args, kwargs, leaves)
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, leaves)
        if func.namespace == "_c10d_functional":
            return self._functional(func, args, kwargs, tensors)
        if func is aten.is_pinned.default:
            return getattr(args[0], "is_in_pinned_memory", False)
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        return self._run(func, args, kwargs, tensors)

    @staticmethod
    def _is_virtual(tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return True
        device = kwargs.get("device")
        kind = None if device is None else torch.device(device).type
        # what becomes of a model on the meta device would not fit into this machine
        return kind == TYPE or (kind == "cpu" and any(tensor.is_meta for tensor in tensors))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs = kwargs | {"pin_memory": None}
        if func in INDEXING:
            args = self._with_numbers(args)
        if func in WAITING:
            self.tally.add_read()
        values = None
        if func in WAITING or _known(func, tensors):
            values = self._values(func, args, kwargs, tensors)
        if func in WAITING:
            return tree_map(self._given, values)
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
            args, kwargs = tree_map(self._faked, (args, kwargs))
        with self.fake:
            out = func(*args, **kwargs)
        self._count(func, args, kwargs, tensors, out)
        self._keep(func, out, values, args)
        for tensor in _leaves(out if isinstance(out, tuple | list) else (out,), {}):
            if isinstance(tensor, FakeTensor):
                if _kind(tensor) == TYPE:
                    self.tally.device.hold(tensor)
                elif _kind(tensor) == "cpu":
                    self.tally.host.hold(tensor)
                if is_pinned:
                    tensor.is_in_pinned_memory = True
        return out

    def _faked(self, leaf: Any) -> Any:
        # FakeTensorMode itself would keep the values of small host tensors, and copy them to a real device
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        with self.fake:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    def _with_numbers(self, args: Any) -> Any:
        # masks as indices, since the size of the result follows from their values
        tensor, indices, *others = args
        numbers: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and _on_device(index):
                with self:
                    numbers += torch.unbind(index.nonzero(), 1)
            else:
                numbers.append(index)
        return (tensor, numbers, *others)

    def _values(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Run an operation on the known values of its tensors, in host memory."""
        if not all(_value(tensor) is not None for tensor in tensors):
            raise UnknownValueError(
                f"{func} needs values of the device, which are not known before it has run"
            )
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        args, kwargs = tree_map(
            lambda leaf: _value(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        return func(*args, **kwargs)

    def _given(self, value: Any) -> Any:
        # a result whose size follows from values
        if not isinstance(value, Tensor):
            return value
        with self.fake:
            out = torch.empty(value.shape, dtype=value.dtype, device=TYPE)
        self.tally.device.hold(out)
        _set_value(out, value)
        return out

    def _keep(self, func: Any, out: Any, values: Any, args: Any) -> None:
        if values is None:
            if func._schema.is_mutable and args and isinstance(args[0], FakeTensor):
                _set_value(args[0], None)
            return
        for tensor, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if (
                isinstance(tensor, FakeTensor)
                and not value.is_floating_point()
                and value.numel() <= MAX_VALUES
            ):
                _set_value(tensor, value)

    def _read(self, tensor: Tensor) -> Any:
        if _kind(tensor) == TYPE:
            self.tally.add_read()
        value = _value(tensor)
        if value is not None:
            return value.item()
        if tensor.is_floating_point():
            return READING
        if tensor.dtype == torch.bool and _kind(tensor) == "cpu":
            return True  # of a result: that it is finite
        raise UnknownValueError("an integer is read from the device that does not follow from the host's")

    def _pinned(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor.clone()
        with self.fake:
            out = aten.clone.default(tensor)
        self.tally.host.hold(out)
        out.is_in_pinned_memory = True
        return out

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], out: Any) -> None:
        if func in COPYING:
            source, target = (tensors[1], tensors[0]) if func is aten.copy_.default else (tensors[0], out)
            kinds = _kind(source), _kind(target)
            if kinds == ("cpu", TYPE):
                self.tally.add_copy("in", source.nbytes)
            elif kinds == (TYPE, "cpu"):
                self.tally.add_copy("out", source.nbytes)
        if func is aten._grouped_mm.default:  # of experts: each row goes to one matrix
            self.tally.add_flops(str(func.overloadpacket), 2 * args[0].numel() * args[1].shape[-1])
        operation = aten.addmm if func is aten.addmm_.default else func.overloadpacket
        formula = flop_registry.get(operation)
        if formula is not None and any(_kind(tensor) == TYPE for tensor in tensors):
            if func is aten.bmm.dtype:  # its data type would be taken for a shape
                args = args[:2]
            self.tally.add_flops(str(operation), formula(*args, **kwargs, out_val=out))

    def _collective(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
        ranks = next(filter(None, map(_ranks, groups)), (0, 0, 0))
        if tensors:
            self.tally.add_collective(
                Collective(
                    func._schema.name.removeprefix("c10d::"),
                    tuple(tuple(tensor.shape) for tensor in tensors),
                    f"{tensors[0].dtype} {_kind(tensors[0])}".removeprefix("torch."),
                    ranks,
                    max(tensor.nbytes for tensor in tensors),
                )
            )
        if not self._is_virtual(tensors, {}):
            return func(*args, **kwargs)
        kinds = {_kind(tensor) for tensor in tensors}
        if len(kinds) > 1:
            raise RuntimeError(f"{func._schema.name} has tensors on {' and '.join(sorted(kinds))}")
        for tensor in tensors:
            _set_value(tensor, None)
        with self.fake:
            return func(*args, **kwargs)

    def _functional(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        # of DTensor: the group is the last argument, by name
        args = tree_map(self._faked, args)
        with self.fake:
            out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if _kind(tensor) == TYPE:
                self.tally.device.hold(tensor)
        group = (*args, *kwargs.values())[-1]
        if not isinstance(group, Tensor):  # else it waits for one
            group = _resolve_process_group(group) if isinstance(group, str) else group
            ranks = get_process_group_ranks(_unboxed(group))
            given = max([*tensors, out], key=lambda tensor: tensor.nbytes)
            kind = f"{given.dtype} {_kind(given)}".removeprefix("torch.")
            span = len(ranks), min(ranks), max(ranks)
            name = func._schema.name.removeprefix("_c10d_functional::")
            self.tally.add_collective(Collective(name, (tuple(given.shape),), kind, span, given.nbytes))
        return out


def _leaves(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    # faster than for any tree: operations take no deeper ones
    leaves: list[Any] = []
    for value in (*args, *kwargs.values()):
        leaves.extend(value) if isinstance(value, list | tuple) else leaves.append(value)
    return leaves


def _kind(tensor: Tensor) -> str:
    return tensor.fake_device.type if isinstance(tensor, FakeTensor) else tensor.device.type


def _on_device(tensor: Tensor) -> bool:
    return _kind(tensor) == TYPE


def _value(tensor: Tensor) -> Tensor | None:
    return getattr(tensor, "known_value", None) if isinstance(tensor, FakeTensor) else tensor


def _set_value(tensor: Tensor, value: Tensor | None) -> None:
    if isinstance(tensor, FakeTensor):
        tensor.known_value = value


def _known(func: Any, tensors: list[Tensor]) -> bool:
    if any(_value(tensor) is None or tensor.is_meta or tensor.is_floating_point() for tensor in tensors):
        return False
    return all(tensor.numel() <= MAX_VALUES for tensor in tensors)


def _unboxed(group: Any) -> Any:
    return ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


def _ranks(group: Any) -> tuple[int, int, int] | None:
    try:
        ranks = get_process_group_ranks(_unboxed(group))
    except (RuntimeError, TypeError, ValueError, KeyError):  # a reduction, or a work handle
        return None
    return len(ranks), min(ranks), max(ranks)


def track_resizes(tally: Tally) -> None:
    """Follow FSDP, which frees a gathered weight by giving its storage no bytes."""
    original: Callable[..., Any] = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        tally.device.resize(storage)
        tally.host.resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize_


def count_lists(tally: Tally) -> None:
    """Count a list of a tensor's values as one read."""
    original = FakeTensor.tolist

    @functools.wraps(original)
    def tolist(tensor: FakeTensor) -> Any:
        if _kind(tensor) != TYPE:
            return original(tensor)
        value = _value(tensor)
        if value is None and not tensor.is_floating_point():
            raise UnknownValueError("integers are read from the device that do not follow from the host's")
        tally.add_read()
        return torch.full(tensor.shape, READING).tolist() if value is None else value.tolist()

    FakeTensor.tolist = tolist


def skip_head_kernels() -> None:
    """Let the kernels of the head's softmax write nothing, and refuse tensors of several devices."""

    def launch(kernel: Any, *inputs: Any) -> None:
        devices = {str(tensor.device) for tensor in inputs if isinstance(tensor, Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{kernel.fn.__name__} needs all tensors on one device, got {sorted(devices)}")

    triton_softmax._launch = launch
