# SPDX-License-Identifier: Apache-2.0
"""Syncs that send only changed weights: engines get the bits of a full sync, and every byte is counted."""

import os
import random
import socket
import struct
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests.helpers.weights import TENSORS
from verl.distributed.weights import peer_link
from verl.distributed.weights.changes import find_changes
from verl.distributed.weights.delta import DeltaReader, DeltaServer
from verl.distributed.weights.peer_link import RECEIVER, PeerLink
from verl.distributed.weights.peer_lost import PeerLostError
from verl.distributed.weights.server import Traffic, WeightServer
from verl.utils.background import in_background

pytestmark = pytest.mark.heavy

CPU, HERE = torch.device("cpu"), "127.0.0.1"
BUCKET_BYTES = 4096
TIME_LIMIT_S = 240  # of a thread that would hang
DENSITIES = [0.0, 0.003, 0.05, 0.4, 1.0]  # shares of the weights that a sync changes


@contextmanager
def serving(world_size, **options):
    options = {"on_lost": print, "bucket_bytes": BUCKET_BYTES, **options}
    servers = [DeltaServer(rank, world_size, CPU, HERE, **options) for rank in range(world_size)]
    yield servers
    for server in servers:
        server.close()


@contextmanager
def engines(count):
    readers = [DeltaReader(0, 1, CPU, HERE) for _ in range(count)]
    yield readers
    for reader in readers:
        reader.close()


def published(servers, version, tensors):
    return [server.publish(version, tensors.items()) for server in servers]


def traffic(servers):
    each = [server.take_traffic() for server in servers]
    return Traffic(sum(one.sent for one in each), sum(one.whole for one in each))


def bits(tensors):
    return {name: tensor.contiguous().flatten().view(torch.uint8) for name, tensor in tensors.items()}


def check_same_bits(found, expected):
    found, expected = bits(dict(found)), bits(expected)
    assert list(found) == list(expected)
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def make_weights(dtype):
    drawn = torch.Generator().manual_seed(0)
    sizes = [3000, 20, 7000, 1, 999, 2048]
    weights = {f"layer{n}": torch.randn(size, generator=drawn).to(dtype) for n, size in enumerate(sizes)}
    return weights | TENSORS


def changed(weights, density, seed):
    """Return other weights, with NaN and zeros of both signs among the new values."""
    drawn = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in weights.items():
        result[name] = tensor
        if tensor.is_floating_point():
            new = torch.randn(tensor.shape, generator=drawn).to(tensor.dtype)
            kind = torch.rand(tensor.shape, generator=drawn)
            new[kind < 0.3], new[kind < 0.2], new[kind < 0.1] = torch.nan, 0.0, -0.0
            result[name] = torch.where(
                torch.rand(tensor.shape, generator=drawn) < density, new.where(new != tensor, -tensor), tensor
            )
    return result


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_engines_have_the_bits_of_a_full_sync_after_twenty_with_lost_joined_and_late_ones(dtype, world_size):
    draw, weights = random.Random(0), make_weights(dtype)
    shares, versions = {}, {0: weights}
    with serving(world_size) as servers, engines(4) as (always, lost, joined, late):
        for version in range(1, 21):
            weights = versions[version] = changed(weights, draw.choice(DENSITIES), version)
            shares[version] = published(servers, version, weights)
            check_same_bits(always.named_tensors(version, shares[version]), weights)
            if version < 5:
                check_same_bits(lost.named_tensors(version, shares[version]), weights)
            elif version == 5:  # it is lost in the middle of a sync
                next(lost.named_tensors(version, shares[version]))
                lost.close()
            if version >= 8:
                check_same_bits(joined.named_tensors(version, shares[version]), weights)
            if version % 3 == 0:  # misses versions, and takes the one before the newest
                check_same_bits(late.named_tensors(version - 1, shares[version - 1]), versions[version - 1])
        everything = traffic(servers)

    assert everything.sent < 0.8 * everything.whole


def test_only_an_engine_with_the_version_before_gets_changes_and_their_bytes_are_counted():
    # 4,096 weights of 2 bytes in two buckets, of which two words change: 2 + 2 bytes each, 4 for each bucket
    old = {name: torch.ones(2048, dtype=torch.bfloat16) for name in "ab"}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][[5, 70]] = 2
    with serving(1) as servers, engines(3) as (constant, joined, behind):
        first = published(servers, 1, old)
        check_same_bits(constant.named_tensors(1, first), old)
        assert traffic(servers) == (8192, 8192)

        second = published(servers, 2, new)
        check_same_bits(constant.named_tensors(2, second), new)
        assert traffic(servers) == (2 * 4 + 2 * 4, 8192)
        check_same_bits(joined.named_tensors(2, second), new)
        assert traffic(servers) == (8192, 8192)

        check_same_bits(behind.named_tensors(2, second), new)
        third, fourth = published(servers, 3, old), published(servers, 4, new)
        traffic(servers)
        check_same_bits(behind.named_tensors(4, fourth), new)  # version 2 is forgotten
        assert traffic(servers) == (8192, 8192)
        check_same_bits(constant.named_tensors(3, third), old)  # so it is when 2 was not compared with 3
        assert traffic(servers) == (8192, 8192)
        check_same_bits(constant.named_tensors(4, fourth), new)
        assert traffic(servers) == (2 * 4 + 2 * 4, 8192)


def test_changes_that_were_found_serve_an_engine_that_asks_after_the_next_version():
    weights = [{"a": torch.full((2048,), value, dtype=torch.bfloat16)} for value in (1.0, 1.0, 2.0)]
    with serving(1) as servers, engines(2) as (fast, slow):
        first = published(servers, 1, weights[0])
        for engine in (fast, slow):
            check_same_bits(engine.named_tensors(1, first), weights[0])
        second = published(servers, 2, weights[1])
        check_same_bits(fast.named_tensors(2, second), weights[1])
        third = published(servers, 3, weights[2])
        traffic(servers)

        check_same_bits(slow.named_tensors(2, second), weights[1])
        assert traffic(servers) == (4, 4096)
        for engine in (fast, slow):
            check_same_bits(engine.named_tensors(3, third), weights[2])


def test_each_bucket_travels_in_the_smaller_way():
    old = make_weights(torch.bfloat16)
    new = changed(old, 0.01, seed=1) | {"layer2": changed(old, 1.0, seed=1)["layer2"]}
    with serving(1, bucket_bytes=1) as servers, engines(1) as (engine,):
        check_same_bits(engine.named_tensors(1, published(servers, 1, old)), old)
        traffic(servers)
        check_same_bits(engine.named_tensors(2, published(servers, 2, new)), new)
        sent = traffic(servers).sent

    pairs = [(bits(old)[name], bits(new)[name]) for name in new]
    expected = [min(after.nbytes, _encoded_bytes(before, after)) for before, after in pairs]
    assert sent == sum(expected) + 1  # an empty tensor takes a byte
    assert expected[2] == new["layer2"].nbytes and expected[0] < 0.1 * new["layer0"].nbytes


def _encoded_bytes(old, new):
    changes = find_changes(old, new)
    return new.nbytes if changes is None else changes.form.num_bytes


def test_tensors_of_a_sync_keep_their_values_while_later_ones_arrive():
    weights = make_weights(torch.bfloat16)
    with serving(1) as servers, engines(1) as (engine,):
        kept = []
        for version in range(4):
            taken = dict(engine.named_tensors(version, published(servers, version, weights)))
            kept.append((taken, weights))
            weights = changed(weights, 0.05, version)

        for taken, expected in kept:
            check_same_bits(taken, expected)


def test_an_engine_whose_sync_failed_gets_everything_in_the_next():
    old = make_weights(torch.bfloat16)
    new = changed(old, 0.01, seed=1)
    with serving(1) as servers, engines(1) as (engine,):
        check_same_bits(engine.named_tensors(1, published(servers, 1, old)), old)
        second, third = published(servers, 2, new), published(servers, 3, new)
        with pytest.raises(PeerLostError, match="newer weights than version 1"):
            next(engine.named_tensors(1, second))
        traffic(servers)
        check_same_bits(engine.named_tensors(3, third), new)

        count = traffic(servers)
        assert count.sent == count.whole


def test_more_ranks_than_buckets_and_other_tensors_are_no_obstacle():
    weights = {"a": torch.ones(10)}
    others = {"a": torch.ones(5), "b": torch.zeros(5), "c": torch.ones(2000)}
    with serving(3) as servers, engines(1) as (engine,):
        for version, each in enumerate([weights, weights, others, others, weights]):
            check_same_bits(engine.named_tensors(version, published(servers, version, each)), each)


def test_an_engine_lost_while_it_takes_changes_holds_up_neither_training_nor_other_engines():
    old = {f"layer{n}": torch.zeros(1 << 19) for n in range(8)}
    new = {name: changed({name: tensor}, 0.4, 1)[name] for name, tensor in old.items()}
    losses, is_lost = [], threading.Event()

    def note(error):
        losses.append(error)
        is_lost.set()

    with serving(1, bucket_bytes=1, on_lost=note) as servers, engines(2) as (lost, other):
        first = published(servers, 1, old)
        for engine in (lost, other):
            check_same_bits(engine.named_tensors(1, first), old)
        second = published(servers, 2, new)
        next(lost.named_tensors(2, second))
        check_same_bits(other.named_tensors(2, second), new)
        publish = partial(published, servers, 3, old)  # takes the memory of version 1
        third = in_background(publish).result(TIME_LIMIT_S)
        lost.close()
        assert is_lost.wait(TIME_LIMIT_S)

        check_same_bits(other.named_tensors(3, third), old)
        publish = partial(published, servers, 4, new)  # takes the memory of version 2
        in_background(publish).result(TIME_LIMIT_S)
    assert len(losses) == 1


class Gated(WeightServer):
    """Answers an engine when the test lets it."""

    asked, gate = threading.Event(), threading.Event()

    def _answer(self, link, request):
        self.asked.set()
        self.gate.wait(TIME_LIMIT_S)
        super()._answer(link, request)


def test_an_engine_that_dies_before_the_answer_does_not_keep_the_memory_of_its_version():
    is_lost, weights = threading.Event(), {"a": torch.ones(10)}
    server = Gated(0, 1, CPU, HERE, on_lost=lambda _: is_lost.set())
    [share] = published([server], 1, weights)
    connection = peer_link.connect(share.server)
    link = PeerLink(connection, RECEIVER, CPU, HERE)
    link.send_message(1)
    assert Gated.asked.wait(TIME_LIMIT_S)
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:  # closing it resets the connection
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()
    connection.close()
    Gated.gate.set()

    assert is_lost.wait(TIME_LIMIT_S)
    for version in (2, 3):
        in_background(partial(published, [server], version, weights)).result(TIME_LIMIT_S)
    server.close()
