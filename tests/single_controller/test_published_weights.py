# SPDX-License-Identifier: Apache-2.0
"""Weights that are stored in shares and read by others."""

import pytest
import ray
import torch

from tests.helpers.weights import TENSORS
from verl.distributed.weights.server import WeightReader, WeightServer
from verl.single_controller.ray.published_weights import StoreReader, WeightStore, own_address

pytestmark = pytest.mark.heavy


@ray.remote
def read(shares):
    return {name: tensor.clone() for name, tensor in StoreReader().named_tensors(5, shares)}


def published(world_size, bucket_bytes):
    return [
        WeightStore(rank, world_size, bucket_bytes).publish(5, TENSORS.items()) for rank in range(world_size)
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 3])
def test_another_process_reads_each_tensor_as_it_was(ray_session, world_size, bucket_bytes):
    shares = published(world_size, bucket_bytes)

    found = ray.get(read.remote(shares[::-1]))

    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name
    buckets = [bucket.layout.tensors for share in shares for bucket in share]
    assert all(len(bucket) == 1 for bucket in buckets if sum(one.num_bytes for one in bucket) > bucket_bytes)


def test_ranks_store_equal_shares_and_no_tensor_twice(ray_session):
    shares = published(3, bucket_bytes=1)

    numbers = [[bucket.layout.number for bucket in share] for share in shares]
    assert max(map(len, numbers)) - min(map(len, numbers)) <= 1
    names = [stored.name for share in shares for bucket in share for stored in bucket.layout.tensors]
    assert sorted(names) == sorted(TENSORS)


def test_both_transports_bring_the_same_bits_in_the_same_order(ray_session):
    where = (torch.device("cpu"), own_address())
    servers = [WeightServer(rank, 2, *where, on_lost=print, bucket_bytes=64) for rank in range(2)]
    served = [server.publish(5, TENSORS.items()) for server in servers]
    reader = WeightReader(0, 1, *where)

    sent = list(reader.named_tensors(5, served))
    stored = list(StoreReader().named_tensors(5, published(2, bucket_bytes=64)))

    assert [name for name, _ in sent] == [name for name, _ in stored]
    for (_, one), (_, other) in zip(sent, stored, strict=True):
        assert one.dtype == other.dtype and one.equal(other)
    for end in (reader, *servers):
        end.close()
