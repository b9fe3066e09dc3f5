# SPDX-License-Identifier: Apache-2.0
"""Joining a Ray cluster, or starting one on this machine."""

import logging
import os
from pathlib import Path

import ray

from verl.single_controller.ray.reachable import why_unreachable
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
    address, origin = _find_cluster(address)
    is_new = address in (None, "local")
    if address is not None and not is_new:
        problem = why_unreachable(address)
        if problem is not None:
            raise _cannot_join(address, origin, problem)
    try:
        ray.init(
            address="local" if is_new else address,
            include_dashboard=False,
            logging_level=logging.ERROR,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
        )
    except (ConnectionError, RuntimeError) as error:
        if is_new:
            raise ClusterError(f"Ray does not start on this machine: {error}") from error
        raise _cannot_join(address, origin, str(error)) from error
    return is_new


def started_cluster() -> str | None:
    """Return the address of the cluster that `ray start` made on this machine, if any."""
    file = _address_file()
    return file.read_text().strip() if file.exists() else None


def _find_cluster(address: str | None) -> tuple[str | None, str]:
    """The address of the cluster to join, and where it is from with how to do without it."""
    if address is not None:
        return address, "named by the caller"
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"], "from `RAY_ADDRESS`; unset it and this run starts a Ray of its own"
    file = _address_file()
    return started_cluster(), f"from {file}, which `ray start` left; `ray stop` ends what is left of it"


def _address_file() -> Path:
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray looks for it
    return Path(folder, "ray", "ray_current_cluster")


def _cannot_join(address: str | None, origin: str, problem: str) -> ClusterError:
    return ClusterError(f"cannot join the Ray cluster at {address} ({origin}): {problem}")
