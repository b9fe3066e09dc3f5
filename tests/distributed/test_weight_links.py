# SPDX-License-Identifier: Apache-2.0
"""Weights that processes send to each other over links: exact, and no one waits for a lost one."""

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.nightly import by_day
from tests.helpers.weights import TENSORS
from verl.distributed.weights.delta import DeltaReader, DeltaServer
from verl.distributed.weights.peer_lost import PeerLostError
from verl.distributed.weights.server import RecycledMemory, WeightReader, WeightServer

pytestmark = pytest.mark.heavy

CPU, HERE = torch.device("cpu"), "127.0.0.1"
SMALL = 64  # bytes of a bucket
BIG = [(f"layer{n}", torch.full((1 << 20,), float(n))) for n in range(8)]  # 4 MiB each


@contextmanager
def serving(world_size=1, **options):
    """The servers of all ranks that train, in this process."""
    options = {"on_lost": print, **options}
    servers = [WeightServer(rank, world_size, CPU, HERE, **options) for rank in range(world_size)]
    yield servers
    for server in servers:
        server.close()


@contextmanager
def reading(**options):
    """An engine of one rank, in this process."""
    reader = WeightReader(0, 1, CPU, HERE, **options)
    yield reader
    reader.close()


def published(servers, version, tensors):
    return [server.publish(version, tensors) for server in servers]


@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_engine_reads_each_tensor_as_it_was(world_size, bucket_bytes):
    with serving(world_size, bucket_bytes=bucket_bytes) as servers, reading() as reader:
        shares = published(servers, 5, TENSORS.items())
        found = dict(reader.named_tensors(5, shares))

    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name


def test_engines_take_versions_when_they_can_and_never_a_mixture():
    with serving(2, bucket_bytes=SMALL) as servers, reading() as fast, reading() as slow:
        first = published(servers, 1, [(name, torch.full((40,), 1.0)) for name in "abc"])
        begun = slow.named_tensors(1, first)
        values = [next(begun)[1].mean()]
        second = published(servers, 2, [(name, torch.full((40,), 2.0)) for name in "abc"])
        newest = [tensor.mean() for _, tensor in fast.named_tensors(2, second)]
        values += [tensor.mean() for _, tensor in begun]
        assert values == [1.0] * 3 and newest == [2.0] * 3

        published(servers, 3, [(name, torch.full((40,), 3.0)) for name in "abc"])
        assert [tensor.mean() for _, tensor in slow.named_tensors(2, second)] == [2.0] * 3
        with pytest.raises(PeerLostError, match="newer weights than version 1"):
            next(fast.named_tensors(1, first))


def test_published_weights_stay_as_they_were_while_training_changes_them():
    weight = torch.ones(1000)
    with serving() as servers, reading() as reader:
        shares = published(servers, 1, [("weight", weight)])
        weight.add_(1)
        assert dict(reader.named_tensors(1, shares))["weight"].equal(torch.ones(1000))


def read_by_both_kinds_of_engines(rank, world_size, folder, server_type, reader_type):
    """Publish a model of two ranks for an engine of both and for two of one; return what differs."""
    import torch.distributed as dist

    from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
    from verl.distributed.fsdp import make_mesh
    from verl.distributed.weights.gathering import full_named_tensors
    from verl.models.lora_weights import is_adapter
    from verl.workers.model_builder import build_model

    model = build_model(
        ModelConfig(model_path=folder, lora=LoraConfig(rank=4)),
        FSDPConfig(),
        mesh=make_mesh(world_size, -1, "cpu"),
        device=CPU,
        trainable=True,
    )
    server = server_type(rank, world_size, CPU, HERE, on_lost=print, bucket_bytes=40_000)
    readers = {"one": reader_type(0, 1, CPU, HERE), "two": reader_type(rank, world_size, CPU, HERE)}
    differences, num_buckets = [], []
    whole = [(name, torch.float32) for name in ("whole", "again")] + [("bf16", torch.bfloat16)]
    for version, (kind, dtype) in enumerate([*whole, ("adapters", None)]):
        with torch.no_grad():
            for param in list(model.parameters())[version::3]:
                param.mul_(1 + 2**-8 * version)
        select = is_adapter if kind == "adapters" else lambda _: True
        expected = dict(full_named_tensors(model, dtype, select))
        shares = [None] * world_size
        dist.all_gather_object(shares, server.publish(version, full_named_tensors(model, dtype, select)))
        num_buckets.append(sum(len(share.buckets) for share in shares))
        for engine, reader in readers.items():
            found = dict(reader.named_tensors(version, shares))
            if list(found) != list(expected):
                differences.append((kind, engine, "names"))
            for name, tensor in expected.items():
                if found[name].dtype != tensor.dtype or not found[name].equal(tensor):
                    differences.append((kind, engine, name))
        dist.barrier()
    for end in (*readers.values(), server):
        end.close()
    return differences, num_buckets, len(expected)


@pytest.mark.parametrize("ends", [(WeightServer, WeightReader), (DeltaServer, DeltaReader)])
def test_engines_of_one_and_two_ranks_read_the_shards_of_two_bit_for_bit(ends, tmp_path):
    from verl.models.tiny import save_tiny_model  # not in the processes of the other tests

    save_tiny_model(tmp_path, "qwen2", tie_word_embeddings=True)

    for differences, num_buckets, num_adapters in run_distributed(
        read_by_both_kinds_of_engines, 2, str(tmp_path), *ends
    ):
        assert differences == [] and num_adapters > 20
        assert num_buckets[0] == num_buckets[1] > num_buckets[2] > 10
        assert num_buckets[3] > 1 and num_buckets[0] % 2 + num_buckets[2] % 2 + num_buckets[3] % 2


def take_and_end(shares, ending, has_taken):
    """An engine that is lost after its first bucket."""
    reader = WeightReader(0, 1, CPU, HERE)
    next(reader.named_tensors(1, shares))
    has_taken.set()
    os.kill(os.getpid(), ending)
    time.sleep(600)


@pytest.mark.nightly("verl/workers")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_while_it_loads_holds_up_neither_training_nor_other_engines(ending):
    context = multiprocessing.get_context("spawn")
    has_taken = context.Event()
    losses = []
    with serving(timeout_s=8, bucket_bytes=1, on_lost=losses.append) as servers, reading() as other:
        shares = published(servers, 1, BIG)
        lost = context.Process(target=take_and_end, args=(shares, ending, has_taken), daemon=True)
        lost.start()
        assert has_taken.wait(240)

        assert [tensor[0] for _, tensor in other.named_tensors(1, shares)] == list(range(8))
        newer = published(servers, 2, BIG)
        assert ending == signal.SIGKILL or not losses  # the time limit has not passed
        published(servers, 3, BIG)  # takes the memory of version 1, once no one is sent it
        assert [tensor[0] for _, tensor in other.named_tensors(2, newer)] == list(range(8))
        lost.kill()
    lost.join()
    assert len(losses) == 1 and "weight link broke" in str(losses[0])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("weight")]


def serve_and_end(results):
    server = WeightServer(0, 1, CPU, HERE, on_lost=print, bucket_bytes=1)
    results.put(server.publish(1, BIG))
    time.sleep(600)


@pytest.mark.parametrize("ending", by_day([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL))
def test_an_engine_learns_in_time_that_a_process_that_trains_is_lost(ending):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    training = context.Process(target=serve_and_end, args=(results,), daemon=True)
    training.start()
    share = results.get(timeout=240)
    with reading(timeout_s=3) as reader:
        weights = reader.named_tensors(1, [share])
        next(weights)
        os.kill(training.pid, ending)

        with pytest.raises(PeerLostError):
            list(weights)
        with pytest.raises(PeerLostError):
            list(reader.named_tensors(1, [share]))
    training.kill()
    training.join()


def test_a_process_of_another_run_gets_nothing():
    with serving(timeout_s=5) as servers:
        [share] = published(servers, 1, BIG)
        stranger = share.server._replace(key=b"another run's")
        with reading() as reader, pytest.raises(PeerLostError, match="digest"):
            next(reader.named_tensors(1, [share.__class__(stranger, share.buckets)]))
        with socket.create_connection(share.server[:2]), reading() as reader:  # says nothing
            assert len(list(reader.named_tensors(1, [share]))) == len(BIG)


def test_memory_is_lent_again_only_when_no_view_is_left():
    memory = RecycledMemory(CPU)
    first = memory.take(1000)
    place, view = first.data_ptr(), first[10:20].view(torch.float16)
    del first
    assert memory.take(1000).data_ptr() != place  # `view` keeps it

    del view
    gc.collect()
    places = {memory.take(500).data_ptr() for _ in range(2)}
    assert place in places
