# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from training to sampling processes, through Ray's object store.

Each rank that trains stores its share in the object store: shared memory, from which all engines of a node
read without a copy, and which Ray copies to other nodes once. Training continues when the
weights are stored, and an engine reads them between two of its steps. `verl.distributed.weights.server`
is the other way.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.util import get_node_ip_address
from torch import Tensor

from verl.distributed.weights.buckets import BUCKET_BYTES, BucketLayout, NamedTensors, own_buckets


@dataclass(frozen=True)
class PublishedWeights:
    """All weights of a version: those after `version` steps of training."""

    version: int
    shares: tuple[Any, ...]  # in the order of the ranks that train: what each returned to publish its share


@dataclass(frozen=True)
class StoredBucket:
    """Tensors that were stored together."""

    layout: BucketLayout
    reference: Any  # Ray's, of their bytes: a list of arrays (num_bytes,) uint8


class WeightStore:
    """Publishes the share of a rank that trains."""

    def __init__(self, rank: int, world_size: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.rank, self.world_size, self.bucket_bytes = rank, world_size, bucket_bytes

    def publish(self, version: int, named_tensors: NamedTensors) -> list[StoredBucket]:
        """Store this rank's share of full tensors, which every rank iterates in the same order to the end."""
        share: list[StoredBucket] = []
        for number, bucket in own_buckets(named_tensors, self.rank, self.world_size, self.bucket_bytes):
            arrays = [_as_bytes(tensor) for _, tensor in bucket]
            share.append(StoredBucket(BucketLayout.of(number, bucket), ray.put(arrays)))
        return share

    def close(self) -> None:
        """Do nothing: Ray frees what no one refers to."""


class StoreReader:
    """Reads published weights in a process that samples."""

    def named_tensors(
        self, version: int, shares: Iterable[list[StoredBucket]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, which must not be written to."""
        buckets = [bucket for share in shares for bucket in share]
        for bucket in sorted(buckets, key=lambda bucket: bucket.layout.number):
            arrays = ray.get(bucket.reference)
            for layout, array in zip(bucket.layout.tensors, arrays, strict=True):
                yield layout.name, _as_tensor(array).view(layout.dtype).view(layout.shape)

    def close(self) -> None:
        """Do nothing: the tensors are Ray's."""


def own_address() -> str:
    """Return the address at which other nodes of the cluster reach this process."""
    return get_node_ip_address()


def _as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the store's memory cannot be written to
        return torch.from_numpy(array)
