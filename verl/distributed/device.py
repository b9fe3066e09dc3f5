# SPDX-License-Identifier: Apache-2.0
"""The few places where CPU and CUDA differ: choice of device, backend, memory readings, seeds."""

import random
import resource
import sys
from pathlib import Path

import numpy as np
import torch

BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
GIB = 1024**3


def resolve_device(name: str) -> str:
    """The device that `trainer.device` stands for.

    Args:
        name: "auto" (CUDA if there is a GPU), "cuda" or "cpu".

    Returns:
        "cuda" or "cpu".

    Raises:
        ValueError: Another name.
        RuntimeError: "cuda" without a GPU that torch can use.
    """
    if name not in ("auto", "cuda", "cpu"):
        raise ValueError(f"`trainer.device` must be one of ['auto', 'cuda', 'cpu'], got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "`trainer.device` (cuda) needs a GPU and a CUDA build of torch,"
            f" found torch {torch.__version__} and no usable GPU:"
            " set trainer.device=cpu or repair the installation"
        )
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def backend_of(device: str) -> str:
    """The process-group backends for a device; gloo serves CPU tensors (objects, offloaded weights)."""
    return BACKENDS[device]


def set_device(device: str, local_rank: int) -> torch.device:
    """Make one GPU the current device of this process and return it; on CPU only return the device.

    Ray usually shows a worker its own GPU only; then that is device 0 whatever the rank.
    """
    if device == "cpu":
        return torch.device("cpu")
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def synchronize(device: str) -> None:
    """Wait until the device has done what was queued, so that a clock read next tells the truth."""
    if device == "cuda":
        torch.cuda.synchronize()


def empty_cache(device: str) -> None:
    """Give cached blocks back to the device, for the rollout engine that shares it."""
    if device == "cuda":
        torch.cuda.empty_cache()


def set_seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (all devices) of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def memory_metrics(device: str) -> dict[str, float]:
    """Memory of this process, in GiB: device peaks since the last reset, and resident host memory."""
    allocated = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {
        "perf/max_memory_allocated_gb": allocated / GIB,
        "perf/max_memory_reserved_gb": reserved / GIB,
        "perf/cpu_memory_used_gb": resident_bytes() / GIB,
    }


def reset_peak_memory(device: str) -> None:
    """Start the device's peak readings of `memory_metrics` anew."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def resident_bytes() -> int:
    """Resident memory of this process now; where the system does not tell, the highest so far."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage reports bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(device: str) -> str:
    """The name of the GPU this process uses, or "cpu"."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
