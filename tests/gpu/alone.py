# SPDX-License-Identifier: Apache-2.0
"""Run a function in a process of its own: afterwards its device memory is free and its engine is gone."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tests.helpers.distributed import free_port


def _enter(device: str, port: int) -> None:
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    import torch

    from verl.distributed.device import backend_of, set_device

    set_device(device, local_rank=0)
    torch.backends.cudnn.allow_tf32 = False  # convolutions of the vision tower round to 10 bits otherwise
    torch.distributed.init_process_group(backend_of(device), rank=0, world_size=1)


def run_alone(function: Callable[..., Any], *args: Any, device: str = "cuda") -> Any:
    """Call a module-level function with a process group of one rank; its result must pickle."""
    with ProcessPoolExecutor(1, get_context("spawn"), _enter, (device, free_port())) as pool:
        return pool.submit(function, *args).result()
