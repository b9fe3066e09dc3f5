# SPDX-License-Identifier: Apache-2.0
"""Run a function on several real gloo processes and collect the result of each rank.

Each rank is a new process, forked from a server that has imported what ranks import: that takes a core seven
seconds, many times what most functions take. Only the seeds of hashes are the same on all ranks; those of a
run's workers differ.
"""

import os
import random
import socket
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IMPORTED = ["tests.helpers.rank_imports"]
PORTS = range(20_000, 32_768)  # below those of outgoing connections, which could take one before it is used


def free_port() -> int:
    """Return a TCP port that is currently free."""
    for port in random.SystemRandom().sample(PORTS, 200):
        with suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free TCP port found from {PORTS.start} to {PORTS.stop - 1}")


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank: that of the test, as it is now, and the group's variables."""
    return os.environ | dict(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )


def _enter(environment: Mapping[str, str], results: Any, function: Callable[..., Any], args: tuple) -> None:
    os.environ.clear()  # the server's
    os.environ.update(environment)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    torch.set_num_threads(1)
    np.random.seed()  # else that of the server, on all ranks
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        results.put((rank, function(rank, world_size, *args), None))
        dist.barrier()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 600,
    method: str = "forkserver",
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on `world_size` processes; return the results by rank.

    The function must be defined at module level and return picklable values: NumPy or plain numbers instead
    of tensors. A rank that raises fails the test with its traceback, and the others are stopped. Environment
    variables that are read when Python or its packages start need the slower `method` "spawn".
    """
    context = mp.get_context(method)
    context.set_forkserver_preload(IMPORTED)
    results = context.Queue()
    port = free_port()
    processes = [
        context.Process(
            target=_enter, args=(_environment(rank, world_size, port), results, function, args), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        values: dict[int, Any] = {}
        for _ in range(world_size):
            rank, value, error = results.get(timeout=timeout_s)
            if error is not None:
                raise AssertionError(f"rank {rank} failed:\n{error}")
            values[rank] = value
        return [values[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.join(timeout=20 if len(values) == world_size else 0)
            if process.is_alive():
                process.kill()
