# SPDX-License-Identifier: Apache-2.0
"""Time of sending weights to processes that sample: through Ray's object store, next to a gloo broadcast.

python benchmarks/weight_transfer.py [--mib 1024] [--receivers 1] [--rounds 5]

Both end when each receiver has all weights in tensors of its own. A round measures both, one after the other.
"""

import argparse
import json
import socket
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, TCPStore

from verl.single_controller.ray.published_weights import PublishedWeights, publish

MATRIX = (1024, 4096)  # bf16: 8 MiB, as a projection of a small model


@ray.remote(num_cpus=0)
class Process:
    """One of the processes; the first has the weights."""

    def __init__(self, rank: int, num_processes: int, port: int, num_tensors: int) -> None:
        torch.set_num_threads(1)
        store = TCPStore("127.0.0.1", port, num_processes, rank == 0, timedelta(seconds=60))
        self.group: ProcessGroup = ProcessGroupGloo(store, rank, num_processes, timedelta(seconds=60))
        value = 1.0 if rank == 0 else 0.0
        self.tensors = {
            f"layer{n}": torch.full(MATRIX, value, dtype=torch.bfloat16) for n in range(num_tensors)
        }

    def ready(self) -> None:
        """Return when the process has joined the group."""

    def broadcast(self) -> None:
        for tensor in self.tensors.values():
            self.group.broadcast(tensor, 0).wait()

    def publish(self) -> PublishedWeights:
        return PublishedWeights.join(1, [publish(self.tensors.items(), 0, 1)])

    def take(self, weights: PublishedWeights) -> None:
        for name, tensor in weights.named_tensors():
            self.tensors[name].copy_(tensor)

    def clear(self) -> float:
        """Return the mean of the weights that came, and forget them."""
        mean = statistics.fmean(tensor.float().mean().item() for tensor in self.tensors.values())
        for tensor in self.tensors.values():
            tensor.zero_()
        return mean


def seconds_of(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the weights")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_tensors = options.mib // 8
    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=(options.mib + 512) * 3 << 20)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    count = 1 + options.receivers
    sender, *receivers = (Process.remote(rank, count, port, num_tensors) for rank in range(count))
    ray.get([process.ready.remote() for process in (sender, *receivers)])

    def by_broadcast() -> None:
        ray.get([process.broadcast.remote() for process in (sender, *receivers)])

    def by_store() -> None:
        weights = ray.get(sender.publish.remote())
        ray.get([process.take.remote(weights) for process in receivers])

    seconds: dict[str, list[float]] = {"broadcast": [], "object store": []}
    for number in range(options.rounds + 1):
        for name, work in (("broadcast", by_broadcast), ("object store", by_store)):
            taken = seconds_of(work)
            means = ray.get([process.clear.remote() for process in receivers])
            assert means == [1.0] * len(receivers), f"{name} lost weights: {means}"
            if number:  # the first round warms up
                seconds[name].append(taken)
    result = dict(rows(seconds, num_tensors * (8 << 20) / 1e9))
    print(json.dumps(result | {"ratio": round(result["object store"]["s"] / result["broadcast"]["s"], 2)}))


def rows(seconds: dict[str, list[float]], gigabytes: float) -> Iterator[tuple[str, dict[str, float]]]:
    for name, values in seconds.items():
        median = statistics.median(values)
        speed = gigabytes / median
        print(f"{name:<14} {median:7.3f} s {speed:7.2f} GB/s   of {[round(value, 3) for value in values]}")
        yield name, {"s": round(median, 4), "gb_per_s": round(speed, 3)}


if __name__ == "__main__":
    main()
