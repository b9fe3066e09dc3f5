# SPDX-License-Identifier: Apache-2.0
"""Joining a Ray cluster, or starting one on this machine."""

import logging
import os
from pathlib import Path

import ray

from verl.single_controller.ray.resource_pool import ClusterError


def connect(address: str | None = None, *, num_cpus: int | None = None, num_gpus: int | None = None) -> bool:
    """Connect this process to Ray, as Ray's own commands do.

    The cluster is the first of: `address`; the environment variable `RAY_ADDRESS`; the one that `ray start`
    made on this machine; a new one on this machine, which ends with this process. A cluster that another
    program started for itself is left alone. A process that is connected stays connected.

    Args:
        address: `host:port` of a cluster, or "local" for a new one.
        num_cpus: CPUs of a new cluster; None counts the machine's. Given, a new cluster is started.
        num_gpus: GPUs of a new cluster; None counts the machine's. Given, a new cluster is started.

    Returns:
        Whether a new cluster was started.

    Raises:
        ClusterError: The cluster cannot be reached.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if num_cpus is not None or num_gpus is not None:
        address = "local"
    address = address or os.environ.get("RAY_ADDRESS") or started_cluster()
    is_new = address in (None, "local")
    try:
        ray.init(
            address="local" if is_new else address,
            include_dashboard=False,
            logging_level=logging.ERROR,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
        )
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(
            f"cannot join the Ray cluster at {address}: {error};"
            " if it is gone, run `ray stop` or unset `RAY_ADDRESS`"
        ) from error
    return is_new


def started_cluster() -> str | None:
    """Return the address of the cluster that `ray start` made on this machine, if any."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray looks for it
    file = Path(folder, "ray", "ray_current_cluster")
    return file.read_text().strip() if file.exists() else None
