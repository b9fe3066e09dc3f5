# SPDX-License-Identifier: Apache-2.0
"""How the arguments of a call split over ranks and how the results join: pure functions, no Ray.

A worker's method says it once, with `@register`; the worker group reads it from the class.

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
    """What each rank is given."""

    ALL = "all"  # the same arguments; the results come back as a list in rank order
    SHARD = "shard"  # its part of each batch along an axis; the results of the parts are joined in order


@dataclass(frozen=True)
class RemoteMethod:
    """What `@register` says about a method."""

    name: str
    dispatch: Dispatch
    phase: str  # what the errors of this call say the worker was doing
    streaming: bool
    axis: str


class Place(NamedTuple):
    """Where one rank stands on a named axis: ranks with the same index form a model-parallel group."""

    index: int
    size: int
    is_first: bool  # of its model-parallel group: its results count for the group


def register(
    dispatch: Dispatch, phase: str, *, streaming: bool = False, axis: str = "train"
) -> Callable[[F], F]:
    """Declare that a worker group may call the method.

    Args:
        dispatch: How arguments split and results join.
        phase: The name of what happens here, for errors.
        streaming: The method is a generator: the caller gets each item when it is there, from all ranks.
            Batches then need not divide evenly: parts differ by at most one row and may be empty.
        axis: "train" or "rollout": the axis `Dispatch.SHARD` splits along.
    """

    def decorator(method: F) -> F:
        setattr(method, ATTRIBUTE, RemoteMethod(method.__name__, dispatch, phase, streaming, axis))
        return method

    return decorator


def remote_methods(worker_class: type) -> dict[str, RemoteMethod]:
    """Return the registered methods of a worker class, by name."""
    found = {}
    for name in dir(worker_class):
        method = getattr(getattr(worker_class, name), ATTRIBUTE, None)
        if isinstance(method, RemoteMethod):
            found[name] = method
    return found


def check_places(axis: str, places: Sequence[Place | None]) -> list[Place]:
    """Return the ranks' places on an axis, or say what is wrong with them."""
    missing = [rank for rank, place in enumerate(places) if place is None]
    if missing:
        raise RuntimeError(f"the workers of ranks {missing} have not called `set_axis({axis!r}, ...)`")
    known = [place for place in places if place is not None]
    sizes = {place.size for place in known}
    first = sorted(place.index for place in known if place.is_first)
    if len(sizes) != 1 or first != list(range(known[0].size)):
        raise RuntimeError(f"axis {axis!r} must have one first rank for each index from 0, got {known}")
    return known


def shard(value: Any, size: int, even: bool) -> list[Any]:
    """Return the `size` parts of a batch in order, or the value itself `size` times if it is not a batch."""
    if not isinstance(value, DataProto):
        return [value] * size
    if even and len(value) % size:
        raise ValueError(
            f"a batch of {len(value)} rows cannot be split evenly over {size} data-parallel ranks:"
            " pad it with `pad_dataproto_to_divisor`"
        )
    bounds = [len(value) * index // size for index in range(size + 1)]
    return [value[start:stop] for start, stop in pairwise(bounds)]


def join(method: RemoteMethod, results: list[Any], places: Sequence[Place] | None) -> Any:
    """Join the ranks' results: all of them, or those of the first rank of each place, concatenated."""
    if method.dispatch is Dispatch.ALL or places is None:
        return results
    by_index = {place.index: result for place, result in zip(places, results, strict=True) if place.is_first}
    ordered = [by_index[index] for index in range(len(by_index))]
    if all(isinstance(result, DataProto) for result in ordered):
        return DataProto.concat(ordered)
    return ordered
