# SPDX-License-Identifier: Apache-2.0
"""Differences between the CPU and GPUs: device selection, transfers, memory readings, seeds."""

import importlib
import importlib.util
import os
import random
import resource
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from verl.distributed.backends import BACKENDS, USUAL_GPU, DeviceBackend, gpu_backends

T = TypeVar("T")

GIB = 1024**3
PAGE = 4096
GPU_STATE = "cuda"  # of any kind of GPU; the name is that of earlier checkpoints


def resolve_device(name: str, cluster: Mapping[str, float] = MappingProxyType({})) -> str:
    """Return the type of device for `trainer.device`; "auto" is the first kind that this machine has.

    `cluster` counts the devices of the Ray cluster by its names for them, such as {"GPU": 8.0}: a run on GPUs
    may start from a machine without one.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"`trainer.device` must be one of {['auto', *BACKENDS]}, got {name!r}")
    if name != "auto":
        backend = BACKENDS[name]
        if backend.is_gpu and not cluster.get(backend.resource) and not is_usable(backend):
            raise RuntimeError(
                f"`trainer.device` ({name}) needs a GPU and a build of torch for it, found {_found(backend)}:"
                " set trainer.device=cpu or repair the installation"
            )
        return name
    if (usable := usable_gpu()) is not None:
        return usable.name
    for backend in gpu_backends():
        if count := cluster.get(backend.resource):
            # The config has the defaults for CPU by now, and the GPUs would idle unnoticed.
            raise RuntimeError(
                f"`trainer.device` (auto) finds no usable GPU on this machine (torch {torch.__version__}),"
                f" but the cluster has {count:g}: set trainer.device={backend.name} to train on them, or"
                " trainer.device=cpu"
            )
    return "cpu"


def is_usable(backend: DeviceBackend) -> bool:
    """Return whether torch can use a device of this kind in this process."""
    module = None if _lacks_package(backend) else module_of(backend.name)
    return module is not None and module.is_available()


def usable_gpu() -> DeviceBackend | None:
    """Return the first kind of GPU that torch can use in this process."""
    return next(filter(is_usable, gpu_backends()), None)


def module_of(device: torch.device | str) -> Any:
    """Return the part of torch for a device, such as `torch.xpu`; None for the CPU and unknown kinds."""
    backend = backend_of(device)
    if not backend.is_gpu:
        return None
    if backend.package is not None:
        importlib.import_module(backend.package)
    return getattr(torch, backend.name, None)


def backend_of(device: torch.device | str) -> DeviceBackend:
    """Return the kind of a device; tensors without storage (`meta`) are on the CPU."""
    kind = device.partition(":")[0] if isinstance(device, str) else device.type
    return BACKENDS.get(kind, BACKENDS["cpu"])


def is_gpu(device: torch.device | str) -> bool:
    """Return whether a device has memory of its own."""
    return backend_of(device).is_gpu


def has_kernels(device: torch.device | str) -> bool:
    """Return whether CUDA's kernels for attention and the head run on a device."""
    return backend_of(device).has_kernels


def group_device(group: dist.ProcessGroup | None = None) -> str:
    """Return the type of device whose tensors the collectives of a group take."""
    return next((kind.name for kind in gpu_backends() if dist.get_backend(group) == kind.collective), "cpu")


def device_name(device: torch.device | str | None = None) -> str | None:
    """Return the name of a GPU, by default of the first kind here; None for the CPU and without the GPU."""
    backend = usable_gpu() if device is None else backend_of(device)
    if backend is None or not is_usable(backend):
        return None
    return module_of(backend.name).get_device_name(device)


def set_device(device: str, local_rank: int) -> torch.device:
    """Make one GPU the current device of this process and return it."""
    backend = backend_of(device)
    if not backend.is_gpu:
        return torch.device("cpu")
    if not is_usable(backend):
        raise RuntimeError(
            f"`trainer.device` ({device}) needs a GPU and a build of torch for it on every node,"
            f" {os.uname().nodename} has {_found(backend)}: set trainer.device=cpu or repair that node"
        )
    # Ray usually makes only a worker's own GPU visible; that is device 0 on every rank.
    module = module_of(device)
    index = local_rank % module.device_count()
    module.set_device(index)
    return torch.device(device, index)


def _found(backend: DeviceBackend) -> str:
    missing = f"without {backend.package}" if _lacks_package(backend) else "and no usable GPU"
    return f"torch {torch.__version__} {missing}"


def _lacks_package(backend: DeviceBackend) -> bool:
    return backend.package is not None and importlib.util.find_spec(backend.package) is None


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


def host_buffer(num_bytes: int, device: torch.device, owner: Any) -> Tensor:
    """Allocate bytes in host memory, page-locked for devices of CUDA until `owner` is gone.

    A GPU copies from and to page-locked memory without an intermediate buffer.
    """
    if device.type != USUAL_GPU:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # torch's own page-locked memory comes in powers of two, which would waste up to half of it.
    whole = torch.empty(-(-num_bytes // PAGE) * PAGE + PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    part = whole[start : start + -(-num_bytes // PAGE) * PAGE]  # shares no page with other memory
    runtime = module_of(USUAL_GPU).cudart()
    code = int(runtime.cudaHostRegister(part.data_ptr(), part.nbytes, 0))
    if code:
        raise RuntimeError(
            f"CUDA cannot lock {part.nbytes / 2**30:.1f} GiB of host memory (error {code}): give the"
            " machine or container more memory, or set `offload.offload_params=false` and"
            " `offload.offload_optimizer=false` in the sections of `worker`, or"
            " `worker.rollout.weight_transport=object_store`"
        )
    weakref.finalize(owner, _unlock, runtime, part).atexit = False
    return part[:num_bytes]


def _unlock(runtime: Any, buffer: Tensor) -> None:
    runtime.cudaHostUnregister(buffer.data_ptr())


def synchronize(device: str) -> None:
    """Wait for queued kernels, so that a clock read next is accurate."""
    if is_gpu(device):
        module_of(device).synchronize()


def empty_cache(device: torch.device | str) -> None:
    """Release cached blocks to the rollout engine that shares the device."""
    if is_gpu(device):
        module_of(device).empty_cache()


def set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: str | None = None) -> dict[str, Any]:
    """Return the state of this process's global generators, in types that load safely.

    Of GPUs it has the current one's, unless `device` is none.
    """
    legacy: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = legacy
    gpu = usable_gpu() if device is None or is_gpu(device) else None
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        GPU_STATE: None if gpu is None else module_of(gpu.name).get_rng_state(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a result of `random_state`, or one that has lists instead of tuples and tensors."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *others = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *others))
    torch.set_rng_state(state["torch"])
    gpu = usable_gpu()
    if state[GPU_STATE] is not None and gpu is not None:
        module_of(gpu.name).set_rng_state(state[GPU_STATE])


# Device values are peaks since `reset_peak_memory`.
def memory_metrics(device: str) -> dict[str, float]:
    memory = module_of(device)
    allocated = memory.max_memory_allocated() if memory else 0
    reserved = memory.max_memory_reserved() if memory else 0
    return {
        "perf/max_memory_allocated_gb": allocated / GIB,
        "perf/max_memory_reserved_gb": reserved / GIB,
        "perf/cpu_memory_used_gb": resident_bytes() / GIB,
    }


def reset_peak_memory(device: str) -> None:
    if is_gpu(device):
        module_of(device).reset_peak_memory_stats()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
