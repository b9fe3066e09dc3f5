# SPDX-License-Identifier: Apache-2.0
"""Time of sending weights to processes that sample, by each transport, next to a gloo broadcast.

    python benchmarks/weight_transfer.py [--mib 1024] [--receivers 1] [--rounds 5] [--changed 0.01]
    python benchmarks/weight_transfer.py --real 1e-6 1e-5 [--steps 6]

Each ends when each receiver has all weights in tensors of its own. A round measures all, one after the other;
before it, a share of the weights changes. With `--real`, SmolLM2-135M-Instruct (`make demo-real` installs it)
is trained for some steps at each learning rate with each transport, for an engine in bfloat16: bytes and
seconds of its syncs.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, TCPStore

from verl.distributed.weights.delta import DeltaReader, DeltaServer
from verl.distributed.weights.server import WeightReader, WeightServer
from verl.single_controller.ray.published_weights import StoreReader, WeightStore

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "quickstart"))
import demo

LOCAL, CPU = "127.0.0.1", torch.device("cpu")
STORE, COLLECTIVE, DELTA = "object_store", "collective", "delta"
WARM_UP = 2  # rounds; links keep two versions
MATRIX = (1024, 4096)  # bf16: 8 MiB, as a projection of a small model


@ray.remote(num_cpus=0)
class Process:
    """One of the processes; the first has the weights."""

    def __init__(self, rank: int, num_processes: int, port: int, num_tensors: int, num_changed: int) -> None:
        torch.set_num_threads(1)
        store = TCPStore(LOCAL, port, num_processes, rank == 0, timedelta(seconds=60))
        self.group: ProcessGroup = ProcessGroupGloo(store, rank, num_processes, timedelta(seconds=60))
        value = 1.0 if rank == 0 else 0.0
        self.tensors = {
            f"layer{n}": torch.full(MATRIX, value, dtype=torch.bfloat16) for n in range(num_tensors)
        }
        self.changing = torch.randperm(MATRIX[0] * MATRIX[1])[:num_changed]  # places in each tensor
        self.publishers = {
            STORE: WeightStore(0, 1),
            COLLECTIVE: WeightServer(0, 1, CPU, LOCAL, on_lost=print),
            DELTA: DeltaServer(0, 1, CPU, LOCAL, on_lost=print),
        }
        self.readers = {
            STORE: StoreReader(),
            COLLECTIVE: WeightReader(0, 1, CPU, LOCAL),
            DELTA: DeltaReader(0, 1, CPU, LOCAL),
        }

    def ready(self) -> None:
        """Return when the process has joined the group."""

    def broadcast(self) -> None:
        for tensor in self.tensors.values():
            self.group.broadcast(tensor, 0).wait()

    def change(self, number: int) -> float:
        """Give some weights other values; return the mean of all."""
        for tensor in self.tensors.values():
            tensor.view(-1)[self.changing] = 1.0 + number % 7
        return self.mean()

    def mean(self) -> float:
        return statistics.fmean(tensor.float().mean().item() for tensor in self.tensors.values())

    def publish(self, transport: str, version: int) -> Any:
        return [self.publishers[transport].publish(version, self.tensors.items())]

    def take(self, transport: str, version: int, shares: Any) -> None:
        for name, tensor in self.readers[transport].named_tensors(version, shares):
            self.tensors[name].copy_(tensor)

    def clear(self) -> float:
        """Return the mean of the weights that came, and forget them."""
        mean = self.mean()
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
    parser.add_argument("--changed", type=float, default=0.01, help="share of the weights")
    parser.add_argument("--real", type=float, nargs="+", metavar="LR", help="learning rates of real runs")
    parser.add_argument("--steps", type=int, default=6, help="of each real run")
    options = parser.parse_args()
    if options.real:
        measure_runs(options.real, options.steps)
    else:
        measure_transports(options)


def measure_transports(options: argparse.Namespace) -> None:
    num_tensors = options.mib // 8
    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=(options.mib + 512) * 3 << 20)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    count = 1 + options.receivers
    num_changed = round(options.changed * MATRIX[0] * MATRIX[1])
    sender, *receivers = (
        Process.remote(rank, count, port, num_tensors, num_changed) for rank in range(count)
    )
    ray.get([process.ready.remote() for process in (sender, *receivers)])

    def by_broadcast(number: int) -> None:
        ray.get([process.broadcast.remote() for process in (sender, *receivers)])

    def by(transport: str, number: int) -> None:
        shares = ray.get(sender.publish.remote(transport, number))
        ray.get([process.take.remote(transport, number, shares) for process in receivers])

    transports = (STORE, COLLECTIVE, DELTA)
    works = {"broadcast": by_broadcast} | {name: partial(by, name) for name in transports}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(options.rounds + WARM_UP):
        expected = ray.get(sender.change.remote(number))
        for name, work in works.items():
            taken = seconds_of(partial(work, number))
            means = ray.get([process.clear.remote() for process in receivers])
            assert means == [expected] * len(receivers), f"{name} lost weights: {means}"
            if number >= WARM_UP:
                seconds[name].append(taken)
    result = dict(rows(seconds, num_tensors * (8 << 20) / 1e9))
    ratios = {name: round(result[name]["s"] / result["broadcast"]["s"], 2) for name in transports}
    print(json.dumps(result | {"ratios": ratios}))


def rows(seconds: dict[str, list[float]], gigabytes: float) -> Iterator[tuple[str, dict[str, float]]]:
    for name, values in seconds.items():
        median = statistics.median(values)
        speed = gigabytes / median
        print(f"{name:<14} {median:7.3f} s {speed:7.2f} GB/s   of {[round(value, 3) for value in values]}")
        yield name, {"s": round(median, 4), "gb_per_s": round(speed, 3)}


def measure_runs(learning_rates: Sequence[float], steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo.DEMOS["real"].prepare(folder, 0)
        for rate in learning_rates:
            for transport in (STORE, COLLECTIVE, DELTA):
                print(json.dumps({"lr": rate, "transport": transport} | run(folder, rate, transport, steps)))


def run(folder: Path, rate: float, transport: str, steps: int) -> dict[str, Any]:
    """Train with an engine in another process; return bytes and seconds of the syncs after the first."""
    options = [
        f"worker.actor.optim.lr={rate}",
        f"worker.rollout.weight_transport={transport}",
        "worker.rollout.dtype=bfloat16",
        "worker.hybrid_engine=false",
        "trainer.n_gpus_per_node=1",
        "trainer.n_gpus_for_rollout=1",
        "trainer.val_before_train=false",
        "trainer.val_freq=0",
        "trainer.save_freq=0",
        f"trainer.max_steps={steps}",
    ]
    log = demo.read_log(demo.train(folder, "real", 0, options, output=f"{transport} {rate}"))
    syncs = [entry for entry in log if "timing_s/sync_weights" in entry][1:]
    found: dict[str, Any] = {
        "s": round(statistics.median(each["timing_s/sync_weights"] for each in syncs), 3)
    }
    if transport != STORE:
        sent, whole = ([each[f"async/weights_{what}_gb"] for each in syncs] for what in ("sent", "whole"))
        shares = [round(part / everything, 4) for part, everything in zip(sent, whole, strict=True)]
        found |= {"mib": round(statistics.median(sent) * 1024, 2), "shares": shares}
    return found


if __name__ == "__main__":
    main()
