# SPDX-License-Identifier: Apache-2.0
"""Run a function in another process with a process group of one rank."""

import gc
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch

from tests.helpers.distributed import free_port


def _enter(device: str, port: int) -> None:
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    from verl.distributed.device import backend_of, set_device

    set_device(device, local_rank=0)
    torch.backends.cudnn.allow_tf32 = False  # convolutions of the vision tower round to 10 bits otherwise
    torch.distributed.init_process_group(backend_of(device).groups, rank=0, world_size=1)


def _new_process(device: str) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), _enter, (device, free_port()))


@cache
def _shared_process(device: str) -> ProcessPoolExecutor:
    return _new_process(device)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    result = function(*args)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def run_alone(function: Callable[..., Any], *args: Any, device: str) -> Any:
    """Call a module-level function in a process of its own, so that its device memory is free afterwards.

    The result must pickle.
    """
    with _new_process(device) as pool:
        return pool.submit(function, *args).result()


def run_apart(function: Callable[..., Any], *args: Any, device: str) -> Any:
    """Call a function as `run_alone` does, but in one process for all, which imports once.

    A function that fails may leave a process that nothing runs in: the next one gets another.
    """
    try:
        return _shared_process(device).submit(_call, function, *args).result()
    except Exception:
        _shared_process.cache_clear()
        raise
