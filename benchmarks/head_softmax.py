# SPDX-License-Identifier: Apache-2.0
"""Softmax of the LM head over a chunk of logits: torch operations next to the Triton kernels.

    python benchmarks/head_softmax.py [--tokens 1766 --vocabulary 151936] [--device cuda]
    TRITON_INTERPRET=1 python benchmarks/head_softmax.py --tiny --device cpu

Prints time, memory traffic and peak memory of log-probs with entropy, of their gradient in bfloat16, and of
the same for the full KL divergence. Traffic is counted, not measured: each operation reads its tensors and
writes its results once. Without a GPU and without Triton's interpreter only torch operations run, and the
kernels' traffic is left out. The last line is JSON.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.distributed.device import is_gpu, resolve_device, synchronize
from verl.models.head.eager_softmax import (
    EagerSoftmax,
    HeadProducts,
    KLGradients,
    KLStatistics,
    LogProbGradients,
    LogProbStatistics,
)
from verl.models.head.logit_chunks import LogitTransform

TINY = {"tokens": 3, "vocabulary": 4500, "repeats": 1}
INDEXING = {torch.ops.aten.gather, torch.ops.aten.scatter_add_}  # one number of each token
PASSES = ("log-probs", "their gradient", "KL", "its gradient")


class Traffic(TorchDispatchMode):
    """Counts the bytes that torch's operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if func.is_view or func.overloadpacket in INDEXING:
            return results
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        if func.overloadpacket is torch.ops.aten.copy_ or "empty" in str(func):
            inputs = inputs[1:]  # only written
        self.bytes += sum(tensor.nbytes for tensor in (*inputs, *written))
        return results


@contextmanager
def kernels_counted(traffic: Traffic) -> Iterator[None]:
    """Count what a launch reads and writes, not what Triton's interpreter does for it."""
    module = sys.modules.get("verl.models.head.triton_softmax")
    if module is None:
        yield
        return
    launch = module._launch

    def counted(kernel: Any, *inputs: Any) -> None:
        before = traffic.bytes
        launch(kernel, *inputs)
        traffic.bytes = before + sum(one.nbytes for one in inputs if isinstance(one, Tensor))

    with patch.object(module, "_launch", counted):
        yield


def make_passes(
    softmax: EagerSoftmax, options: argparse.Namespace, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """Return the four passes over one chunk, which gradients overwrite: their later runs read those."""
    shape = options.tokens, options.vocabulary
    transform = LogitTransform(temperature=options.temperature)
    policy, reference = (HeadProducts(torch.randn(shape, device=device), None, transform) for _ in range(2))
    targets = torch.randint(options.vocabulary, shape[:1], device=device)
    log_probs, lse, entropy = torch.zeros(3, options.tokens, device=device)
    results = LogProbStatistics(log_probs, lse, entropy, None)
    kl = KLStatistics(*torch.zeros(3, options.tokens, device=device))
    ones = torch.ones(options.tokens, device=device)
    given = LogProbGradients(lse, ones, entropy, ones)
    of_kl = KLGradients(kl.lse, ones, mean_gap=kl.mean_gap)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: softmax.log_probs(policy, targets, results),
        lambda: softmax.log_prob_gradient(policy, targets, given, torch.bfloat16, None),
        lambda: softmax.kl(policy, reference, kl),
        lambda: softmax.kl_gradient(policy, reference, of_kl, torch.bfloat16, None),
    )
    return dict(zip(PASSES, calls, strict=True))


def measure(run: Callable[[], Any], device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the shortest of several runs after a warm-up run, which also counts the traffic."""
    memory = torch.get_device_module(device) if is_gpu(device) else None
    with Traffic() as traffic, kernels_counted(traffic):
        run()
    if memory:
        memory.reset_peak_memory_stats()
    held = memory.memory_allocated() if memory else 0
    seconds = float("inf")
    for _ in range(options.repeats):
        synchronize(device.type)
        start = time.perf_counter()
        run()
        synchronize(device.type)
        seconds = min(seconds, time.perf_counter() - start)
    return {
        "milliseconds": 1e3 * seconds,
        "bytes_per_logit": traffic.bytes / (options.tokens * options.vocabulary),
        "gb_per_s": traffic.bytes / seconds / 1e9,
        "extra_mib": (memory.max_memory_allocated() - held) / 2**20 if memory else None,
    }


def implementations(device: torch.device) -> dict[str, EagerSoftmax]:
    """Return what runs on the device; on CPU the kernels need Triton's interpreter."""
    found: dict[str, EagerSoftmax] = {"torch": EagerSoftmax()}
    runs_kernels = is_gpu(device) or os.environ.get("TRITON_INTERPRET") == "1"
    if runs_kernels and importlib.util.find_spec("triton") is not None:
        from verl.models.head.triton_softmax import TritonSoftmax  # noqa: PLC0415 - CPUs need no triton

        found["triton"] = TritonSoftmax()
    return found


def print_table(result: dict[str, Any]) -> None:
    print(f"{result['device']}, torch {result['torch']}; {result['tokens']} x {result['vocabulary']} logits")
    columns = (("milliseconds", 10, ".2f"), ("bytes_per_logit", 13, ".1f"), ("gb_per_s", 8, ".0f"))
    print(f"{'':<24}{'ms':>10}{'bytes/logit':>13}{'GB/s':>8}{'extra MiB':>11}")
    for name in PASSES:
        for softmax, rows in result["softmax"].items():
            row = rows[name]
            extra = "-" if row["extra_mib"] is None else f"{row['extra_mib']:.0f}"
            numbers = "".join(f"{row[key]:>{width}{form}}" for key, width, form in columns)
            print(f"{name:<16}{softmax:<8}{numbers}{extra:>11}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1766, help="of a chunk; 1766 are 1 GiB of logits")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="test that it runs, in seconds on CPU")
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    device = torch.device(resolve_device(options.device))
    torch.manual_seed(0)
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tokens": options.tokens,
        "vocabulary": options.vocabulary,
        "softmax": {
            name: {
                pass_name: measure(run, device, options)
                for pass_name, run in make_passes(softmax, options, device).items()
            }
            for name, softmax in implementations(device).items()
        },
    }
    print_table(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
