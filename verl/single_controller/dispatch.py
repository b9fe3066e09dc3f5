# SPDX-License-Identifier: Apache-2.0
"""Splitting of arguments over ranks and joining of results: pure functions, no Ray.

Example::

    class MyWorker(Worker):
        @register(Dispatch.SHARD, phase="old_log_probs")
        def compute_log_probs(self, batch: DataProto) -> DataProto: ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from verl.protocol import DataProto

F = TypeVar("F", bound=Callable)
ATTRIBUTE = "remote_method"


class Dispatch(Enum):
    """Distribution of a call's arguments."""

    ALL = "all"  # the same arguments on every rank; the results are a list in rank order
    SHARD = "shard"  # a part of each batch along an axis; the results are joined in order


@dataclass(frozen=True)
class RemoteMethod:
    """Metadata that `@register` attaches to a method."""

    name: str
    dispatch: Dispatch
    phase: str  # name of the work, for error messages
    streaming: bool
    axis: str
    unread: tuple[str, ...] = ()  # large columns of batches that it is not sent


class AxisRank(NamedTuple):
    """Position of one rank on a named axis; ranks with the same index form a model-parallel group."""

    index: int
    size: int
    is_first: bool  # in its model-parallel group: its results count for the group


def register(
    dispatch: Dispatch,
    phase: str,
    *,
    streaming: bool = False,
    axis: str = "train",
    unread: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Declare that a worker group may call the method; `phase` names its work in error messages.

    A streaming method is a generator whose items reach the caller as they arrive, from all ranks. Its batches
    need not divide evenly: parts differ by at most one row and may be empty. `Dispatch.SHARD` splits along
    `axis`, "train" or "rollout". Columns in `unread` stay with the caller.
    """

    def decorator(method: F) -> F:
        known = RemoteMethod(method.__name__, dispatch, phase, streaming, axis, unread)
        setattr(method, ATTRIBUTE, known)
        return method

    return decorator


def remote_methods(worker_class: type) -> dict[str, RemoteMethod]:
    known = {name: getattr(getattr(worker_class, name), ATTRIBUTE, None) for name in dir(worker_class)}
    return {name: method for name, method in known.items() if isinstance(method, RemoteMethod)}


def check_axis(axis: str, axis_ranks: Sequence[AxisRank | None]) -> list[AxisRank]:
    """Return the ranks' positions on an axis, or raise if they are incomplete or inconsistent."""
    missing = [rank for rank, known in enumerate(axis_ranks) if known is None]
    if missing:
        raise RuntimeError(f"the workers of ranks {missing} have not called `set_axis({axis!r}, ...)`")
    known = [one for one in axis_ranks if one is not None]
    sizes = {one.size for one in known}
    first = sorted(one.index for one in known if one.is_first)
    if len(sizes) != 1 or first != list(range(known[0].size)):
        raise RuntimeError(f"axis {axis!r} must have one first rank for each index from 0, got {known}")
    return known


def shard(batch: DataProto, size: int, even: bool, unread: tuple[str, ...] = ()) -> list[DataProto]:
    """Return the `size` parts of a batch in order, without some columns."""
    batch = batch.without(unread)
    if even and len(batch) % size:
        raise ValueError(
            f"a batch of {len(batch)} rows cannot be split evenly over {size} data-parallel ranks:"
            " pad it with `pad_dataproto_to_divisor`"
        )
    bounds = [len(batch) * index // size for index in range(size + 1)]
    return [batch[start:stop] for start, stop in pairwise(bounds)]


def join(method: RemoteMethod, results: list[Any], axis_ranks: Sequence[AxisRank] | None) -> Any:
    """Concatenate the results of the first rank of each model-parallel group, or return all as a list."""
    if method.dispatch is Dispatch.ALL or axis_ranks is None:
        return results
    by_index = {one.index: result for one, result in zip(axis_ranks, results, strict=True) if one.is_first}
    ordered = [by_index[index] for index in range(len(by_index))]
    if all(isinstance(result, DataProto) for result in ordered):
        return DataProto.concat(ordered)
    return ordered
