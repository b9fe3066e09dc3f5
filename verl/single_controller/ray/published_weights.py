# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from the processes that train to the ones that sample.

Each rank that trains stores its share in Ray's object store: shared memory, from which all engines of a node
read without a copy, and which Ray copies to other nodes once. Training continues when the
weights are stored, and an engine reads them between two of its steps.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20  # stored at once


class Stored(NamedTuple):
    """A tensor of a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Bucket:
    """Tensors that were stored together."""

    number: int  # in the order of all weights
    tensors: tuple[Stored, ...]
    reference: Any  # Ray's, of their bytes: a list of arrays (num_bytes,) uint8


@dataclass(frozen=True)
class PublishedWeights:
    """All weights of a version: those after `version` steps of training."""

    version: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def join(cls, version: int, shares: Iterable[Sequence[Bucket]]) -> "PublishedWeights":
        """Put together what the ranks of a group have stored."""
        buckets = [bucket for share in shares for bucket in share]
        return cls(version, tuple(sorted(buckets, key=lambda bucket: bucket.number)))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, which must not be written to."""
        for bucket in self.buckets:
            arrays = ray.get(bucket.reference)
            for stored, array in zip(bucket.tensors, arrays, strict=True):
                yield stored.name, _as_tensor(array).view(stored.dtype).view(stored.shape)


def publish(
    named_tensors: Iterable[tuple[str, Tensor]],
    rank: int,
    world_size: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Bucket]:
    """Store this rank's share of full tensors, which every rank iterates in the same order to the end."""
    share: list[Bucket] = []
    for number, bucket in enumerate(_buckets(named_tensors, bucket_bytes)):
        if number % world_size == rank:
            tensors = tuple(Stored(name, tuple(tensor.shape), tensor.dtype) for name, tensor in bucket)
            share.append(Bucket(number, tensors, ray.put([_as_bytes(tensor) for _, tensor in bucket])))
    return share


def _buckets(named_tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
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


def _as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the store's memory cannot be written to
        return torch.from_numpy(array)
