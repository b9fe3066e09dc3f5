# SPDX-License-Identifier: Apache-2.0
"""Weights pass exactly from one process's device to another's, while the first trains on or is lost."""

import os
import signal
import time
from contextlib import contextmanager
from multiprocessing import get_context

import pytest
import torch

from verl.distributed.weights.delta import DeltaReader, DeltaServer
from verl.distributed.weights.peer_link import PIECE_BYTES
from verl.distributed.weights.peer_lost import PeerLostError
from verl.distributed.weights.server import WeightReader, WeightServer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.nightly("verl/distributed"),
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))]),
]

HERE = "127.0.0.1"
WEIGHTS = {  # of the first version; the first tensor travels in several pieces
    "large": torch.arange(PIECE_BYTES, dtype=torch.int32),
    "bf16": torch.arange(15).bfloat16().view(3, 5),
    "float": torch.arange(4.0),
}
TIMEOUT_S = 5.0


def serve(shares, device, server_type):
    """Publish two versions of weights that change at once, as those of a step do."""
    device = torch.device(device, 0)
    server = server_type(0, 1, device, HERE, on_lost=print)
    weights = {name: tensor.to(device) for name, tensor in WEIGHTS.items()}
    for version in range(2):
        shares.put(server.publish(version, weights.items()))
        for tensor in weights.values():
            tensor.add_(1)
    time.sleep(600)


@contextmanager
def serving(device, server_type=WeightServer):
    """A process that sends: its id, and its share of each version."""
    context = get_context("spawn")
    shares = context.SimpleQueue()
    process = context.Process(target=serve, args=(shares, device, server_type), daemon=True)
    process.start()
    yield process.pid, [shares.get() for _ in range(2)]
    process.kill()
    process.join()


@contextmanager
def reading(device, reader_type=WeightReader, timeout_s=TIMEOUT_S):
    device = torch.device(device, 1 if device == "cuda" else None)  # NCCL refuses one GPU for both ends
    reader = reader_type(0, 1, device, HERE, timeout_s=timeout_s)
    yield reader
    reader.close()


@pytest.mark.parametrize("ends", [(WeightServer, WeightReader), (DeltaServer, DeltaReader)])
def test_an_engine_reads_what_was_published_and_not_what_training_made_of_it(ends, device):
    server_type, reader_type = ends
    with serving(device, server_type) as (_, shares), reading(device, reader_type, 60 * TIMEOUT_S) as reader:
        for version, share in enumerate(shares):
            found = dict(reader.named_tensors(version, [share]))

            assert list(found) == list(WEIGHTS)
            for name, tensor in WEIGHTS.items():
                assert found[name].device.type == device and found[name].dtype == tensor.dtype
                assert found[name].cpu().equal(tensor + version)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_learns_in_time_that_a_process_that_trains_is_lost(device, ending):
    with serving(device) as (pid, shares), reading(device) as reader:
        weights = reader.named_tensors(0, shares[:1])
        next(weights)
        os.kill(pid, ending)

        start = time.monotonic()
        with pytest.raises(PeerLostError):
            list(weights)
            list(reader.named_tensors(1, shares[1:]))
        assert time.monotonic() - start < 8 * TIMEOUT_S
