# SPDX-License-Identifier: Apache-2.0
"""Time of sending weights to processes that sample, by each transport, next to a gloo broadcast.

python benchmarks/weight_transfer.py [--mib 1024] [--receivers 1] [--rounds 5]

Each ends when each receiver has all weights in tensors of its own. A round measures all, one after the other.
"""

import argparse
import json
import socket
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, TCPStore

from verl.distributed.weights.server import WeightReader, WeightServer
from verl.single_controller.ray.published_weights import StoreReader, WeightStore

LOCAL, CPU = "127.0.0.1", torch.device("cpu")
STORE, COLLECTIVE = "object store", "collective"
WARM_UP = 2  # rounds; the collective transport keeps two versions
MATRIX = (1024, 4096)  # bf16: 8 MiB, as a projection of a small model


@ray.remote(num_cpus=0)
class Process:
    """One of the processes; the first has the weights."""

    def __init__(self, rank: int, num_processes: int, port: int, num_tensors: int) -> None:
        torch.set_num_threads(1)
        store = TCPStore(LOCAL, port, num_processes, rank == 0, timedelta(seconds=60))
        self.group: ProcessGroup = ProcessGroupGloo(store, rank, num_processes, timedelta(seconds=60))
        value = 1.0 if rank == 0 else 0.0
        self.tensors = {
            f"layer{n}": torch.full(MATRIX, value, dtype=torch.bfloat16) for n in range(num_tensors)
        }
        self.publishers = {
            STORE: WeightStore(0, 1),
            COLLECTIVE: WeightServer(0, 1, CPU, LOCAL, on_lost=print),
        }
        self.readers = {STORE: StoreReader(), COLLECTIVE: WeightReader(0, 1, CPU, LOCAL)}

    def ready(self) -> None:
        """Return when the process has joined the group."""

    def broadcast(self) -> None:
        for tensor in self.tensors.values():
            self.group.broadcast(tensor, 0).wait()

    def publish(self, transport: str, version: int) -> Any:
        return [self.publishers[transport].publish(version, self.tensors.items())]

    def take(self, transport: str, version: int, shares: Any) -> None:
        for name, tensor in self.readers[transport].named_tensors(version, shares):
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

    def by_broadcast(number: int) -> None:
        ray.get([process.broadcast.remote() for process in (sender, *receivers)])

    def by(transport: str, number: int) -> None:
        shares = ray.get(sender.publish.remote(transport, number))
        ray.get([process.take.remote(transport, number, shares) for process in receivers])

    works = {"broadcast": by_broadcast, STORE: partial(by, STORE), COLLECTIVE: partial(by, COLLECTIVE)}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(options.rounds + WARM_UP):
        for name, work in works.items():
            taken = seconds_of(partial(work, number))
            means = ray.get([process.clear.remote() for process in receivers])
            assert means == [1.0] * len(receivers), f"{name} lost weights: {means}"
            if number >= WARM_UP:
                seconds[name].append(taken)
    result = dict(rows(seconds, num_tensors * (8 << 20) / 1e9))
    ratios = {name: round(result[name]["s"] / result["broadcast"]["s"], 2) for name in (STORE, COLLECTIVE)}
    print(json.dumps(result | {"ratios": ratios}))


def rows(seconds: dict[str, list[float]], gigabytes: float) -> Iterator[tuple[str, dict[str, float]]]:
    for name, values in seconds.items():
        median = statistics.median(values)
        speed = gigabytes / median
        print(f"{name:<14} {median:7.3f} s {speed:7.2f} GB/s   of {[round(value, 3) for value in values]}")
        yield name, {"s": round(median, 4), "gb_per_s": round(speed, 3)}


if __name__ == "__main__":
    main()
