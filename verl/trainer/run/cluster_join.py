# SPDX-License-Identifier: Apache-2.0
"""Finding the devices of a run, whatever it trains: at once, after some patience, or fewer than asked for."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import ray

from verl.config.trainer import RunTree
from verl.single_controller.ray.cluster import connect
from verl.single_controller.ray.resource_pool import ClusterError, ResourcePool
from verl.trainer.run.elastic import largest_run
from verl.utils.rank_logger import get_logger

RETRY_S = 1.0  # between looks for machines that are missing

C = TypeVar("C", bound=RunTree)

logger = get_logger(__name__)


def join_cluster(config: C, device: str, patience_s: float, stack: ExitStack) -> tuple[C, ResourcePool]:
    """Connect to Ray and find the devices; with `trainer.elastic` fewer of them change the config.

    Args:
        config: Of the run.
        device: What its workers run on: "cuda" or "cpu".
        patience_s: How long to wait, in seconds, for a cluster that is too small or cannot be reached.
        stack: Of the run; leaving it disconnects, unless this process was connected before.

    Raises:
        ClusterError: The cluster is too small, or cannot be reached.
    """
    deadline = time.monotonic() + patience_s
    if not ray.is_initialized():
        _until(deadline, connect)
        stack.callback(ray.shutdown)
    pool = _pool_of(config, device)
    try:
        _until(deadline, pool.check)
    except ClusterError:
        smaller = largest_run(config, pool.capacities()) if config.trainer.elastic else None
        if smaller is None:
            raise
        options = smaller.trainer
        logger.warning(
            "fewer devices than asked for: nodes=%d of=%d on_each=%d of=%d",
            options.nnodes, config.trainer.nnodes, options.n_gpus_per_node, config.trainer.n_gpus_per_node,
        )  # fmt: skip
        return smaller, _pool_of(smaller, device)
    return config, pool


def _pool_of(config: RunTree, device: str) -> ResourcePool:
    return ResourcePool(config.trainer.nnodes, config.trainer.n_gpus_per_node, device)


def _until(deadline: float, attempt: Callable[[], object]) -> None:
    """Repeat what the cluster refuses until the deadline, by the monotonic clock."""
    while True:
        try:
            attempt()
        except ClusterError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return
