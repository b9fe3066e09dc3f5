# SPDX-License-Identifier: Apache-2.0
"""Import vLLM into a process that trains: its version, environment variables and patches."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl.distributed.device import is_gpu
from verl.workers.rollout.generation_rng import preserved_rng
from verl.workers.rollout.vllm.cpu_patches import apply_cpu_patches
from verl.workers.rollout.vllm.patches import apply_patches

SUPPORTED = ((0, 26), (0, 33))  # from, and below
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for answers and metrics
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # processes share the cores as OMP_NUM_THREADS says
    "TORCH_COMPILE_DISABLE": "1",  # compiles small helpers for seconds at the first step otherwise
}
GPU_ENVIRONMENT = {
    # FlashInfer's wheels hold no compiled sampler: the first request with top-p or top-k would need nvcc, and
    # would draw from torch's CUDA generator. vLLM's own kernel takes a seed for each request instead.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # its all-reduce exchanges memory handles between processes, of which each sees one GPU only
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def import_vllm(device: str) -> Any:
    set_environment(device)  # vLLM reads it on import
    with preserved_rng(device):  # packages draw random numbers when they are imported
        vllm = importlib.import_module("vllm")
        check_version(vllm.__version__)
        apply_patches()
        if not is_gpu(device):
            apply_cpu_patches()
    return vllm


def set_environment(device: str) -> None:
    """Set vLLM's environment variables, except for those set by the user."""
    # not the user's choice: with multiprocessing the engine would leave this process, where the weights are
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = ENVIRONMENT | (GPU_ENVIRONMENT if is_gpu(device) else CPU_ENVIRONMENT)
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (defaults | single).items():
        os.environ.setdefault(name, value)


def choose_device(device: str) -> None:
    """Have the next engine take this process's current GPU."""
    if is_gpu(device):
        os.environ["LOCAL_RANK"] = str(torch.get_device_module(device).current_device())


def check_version(found: str) -> None:
    """Raise `RuntimeError` if the version is outside of `SUPPORTED`."""
    lowest, above = SUPPORTED
    version = tuple(int(part) for part in found.split(".")[:2])
    if not lowest <= version < above:
        bounds = ">={}.{},<{}.{}".format(*lowest, *above)
        raise RuntimeError(f"vLLM {found} is not supported, {bounds} is: pip install 'vllm{bounds}'")


@contextmanager
def preserved_threads() -> Iterator[None]:
    """Restore `torch.set_num_threads`, which vLLM replaces by a no-op on CPU for the whole process."""
    function, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = function
        torch.set_num_threads(threads)
