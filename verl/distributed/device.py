# SPDX-License-Identifier: Apache-2.0
"""Differences between CPU and CUDA: device selection, backends, memory readings, seeds."""

import os
import random
import resource
import sys
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

T = TypeVar("T")

# gloo serves CPU tensors: objects and offloaded weights.
BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
GPUS = {"cuda"}  # types of device with memory of their own
GIB = 1024**3


def resolve_device(name: str, cluster_gpus: int = 0) -> str:
    """Return "cuda" or "cpu" for `trainer.device`; "auto" is CUDA if this machine has a GPU.

    `cluster_gpus` counts the GPUs of the Ray cluster: "cuda" runs on them from a machine without one.
    """
    if name not in ("auto", "cuda", "cpu"):
        raise ValueError(f"`trainer.device` must be one of ['auto', 'cuda', 'cpu'], got {name!r}")
    if name == "cuda" and not cluster_gpus and not torch.cuda.is_available():
        raise RuntimeError(
            "`trainer.device` (cuda) needs a GPU and a CUDA build of torch,"
            f" found torch {torch.__version__} and no usable GPU:"
            " set trainer.device=cpu or repair the installation"
        )
    if name == "auto" and cluster_gpus and not torch.cuda.is_available():
        # The config has the defaults for CPU by now, and the GPUs would idle unnoticed.
        raise RuntimeError(
            f"`trainer.device` (auto) finds no usable GPU on this machine (torch {torch.__version__}),"
            f" but the cluster has {cluster_gpus}: set trainer.device=cuda to train on them, or"
            " trainer.device=cpu"
        )
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def is_gpu(device: torch.device | str) -> bool:
    return torch.device(device).type in GPUS


def backend_of(device: str) -> str:
    return BACKENDS[device]


def set_device(device: str, local_rank: int) -> torch.device:
    """Make one GPU the current device of this process and return it."""
    if device == "cpu":
        return torch.device("cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "`trainer.device` (cuda) needs a GPU and a CUDA build of torch on every node,"
            f" {os.uname().nodename} has torch {torch.__version__} and no usable GPU:"
            " set trainer.device=cpu or repair that node"
        )
    # Ray usually makes only a worker's own GPU visible; that is device 0 on every rank.
    module = torch.get_device_module(device)
    index = local_rank % module.device_count()
    module.set_device(index)
    return torch.device(device, index)


def to_device(values: T, device: torch.device | str) -> T:
    """Copy the CPU tensors in nested tuples, lists and dicts to a device, in one transfer for each dtype.

    Transfers to a GPU are queued from pinned memory: the CPU does not wait for the device.
    """
    leaves, structure = tree_flatten(values)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            by_dtype.setdefault(leaf.dtype, []).append(number)
    for numbers in by_dtype.values():
        parts = [leaves[number] for number in numbers]
        flat = torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)
        sent = (flat.pin_memory() if is_gpu(device) else flat).to(device, non_blocking=True)
        for number, part, copy in zip(
            numbers, parts, sent.split([part.numel() for part in parts]), strict=True
        ):
            leaves[number] = copy.view(part.shape)
    return tree_unflatten(leaves, structure)


def synchronize(device: str) -> None:
    """Wait for queued kernels, so that a clock read next is accurate."""
    if is_gpu(device):
        torch.get_device_module(device).synchronize()


def empty_cache(device: torch.device | str) -> None:
    """Release cached blocks to the rollout engine that shares the device."""
    if is_gpu(device):
        torch.get_device_module(device).empty_cache()


def set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# Device values are peaks since `reset_peak_memory`.
def memory_metrics(device: str) -> dict[str, float]:
    memory = torch.get_device_module(device) if is_gpu(device) else None
    allocated = memory.max_memory_allocated() if memory else 0
    reserved = memory.max_memory_reserved() if memory else 0
    return {
        "perf/max_memory_allocated_gb": allocated / GIB,
        "perf/max_memory_reserved_gb": reserved / GIB,
        "perf/cpu_memory_used_gb": resident_bytes() / GIB,
    }


def reset_peak_memory(device: str) -> None:
    if is_gpu(device):
        torch.get_device_module(device).reset_peak_memory_stats()


def resident_bytes() -> int:
    """Return the resident memory of this process, or its peak if the system reports no current value."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage reports bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
