# SPDX-License-Identifier: Apache-2.0
"""Weights in buckets: tensors that travel together, as bytes one after another.

The ranks that train gather all buckets together, and each keeps every `world_size`-th: its share.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20  # unless a single tensor is larger
ALIGNMENT = 64  # bytes between the starts of two tensors

NamedTensors = Iterable[tuple[str, Tensor]]


class TensorLayout(NamedTuple):
    """A tensor of a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int  # its first byte in the bucket
    num_bytes: int


@dataclass(frozen=True)
class BucketLayout:
    """The tensors of a bucket, and where they are in its bytes."""

    number: int  # in the order of all weights
    tensors: tuple[TensorLayout, ...]

    @classmethod
    def of(cls, number: int, named_tensors: NamedTensors) -> "BucketLayout":
        layouts, start = [], 0
        for name, tensor in named_tensors:
            layouts.append(TensorLayout(name, tuple(tensor.shape), tensor.dtype, start, tensor.nbytes))
            start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(number, tuple(layouts))

    @property
    def num_bytes(self) -> int:
        return max(1, self.tensors[-1].start + self.tensors[-1].num_bytes)  # an empty tensor travels too

    def views(self, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that the bytes (num_bytes,) of the bucket hold."""
        for each in self.tensors:
            part = data[each.start : each.start + each.num_bytes]
            yield each.name, part.view(each.dtype).view(each.shape)


def own_buckets(
    named_tensors: NamedTensors, rank: int, world_size: int, size: int
) -> Iterator[tuple[int, list[tuple[str, Tensor]]]]:
    """Yield the buckets of this rank's share with their numbers.

    Every rank iterates the same full tensors in the same order to the end: gathering them is collective.
    """
    for number, bucket in enumerate(_buckets(named_tensors, size)):
        if number % world_size == rank:
            yield number, bucket


def _buckets(named_tensors: NamedTensors, size: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in named_tensors:
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket
