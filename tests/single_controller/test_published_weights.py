# SPDX-License-Identifier: Apache-2.0
"""Weights that are stored in shares and read by others."""

import pytest
import ray
import torch

from verl.single_controller.ray.published_weights import PublishedWeights, publish

pytestmark = pytest.mark.heavy

TENSORS = {
    "matrix": torch.randn(7, 5),
    "bf16": torch.randn(3, 4).bfloat16(),
    "large": torch.randn(100),  # more than a bucket
    "scalar": torch.tensor(2.5),
    "not contiguous": torch.arange(12).view(3, 4).t(),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3),
}


@ray.remote
def read(weights):
    return weights.version, {name: tensor.clone() for name, tensor in weights.named_tensors()}


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 3])
def test_another_process_reads_each_tensor_as_it_was(ray_session, world_size, bucket_bytes):
    shares = [publish(TENSORS.items(), rank, world_size, bucket_bytes) for rank in range(world_size)]

    weights = PublishedWeights.join(5, shares[::-1])
    version, found = ray.get(read.remote(weights))

    assert version == 5 and list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name
    sizes = [sum(TENSORS[one.name].nbytes for one in bucket.tensors) for bucket in weights.buckets]
    assert all(
        len(bucket.tensors) == 1
        for bucket, size in zip(weights.buckets, sizes, strict=True)
        if size > bucket_bytes
    )


def test_ranks_store_equal_shares_and_no_tensor_twice(ray_session):
    shares = [publish(TENSORS.items(), rank, 3, bucket_bytes=1) for rank in range(3)]

    numbers = [[bucket.number for bucket in share] for share in shares]
    assert max(map(len, numbers)) - min(map(len, numbers)) <= 1
    names = [stored.name for share in shares for bucket in share for stored in bucket.tensors]
    assert sorted(names) == sorted(TENSORS)
