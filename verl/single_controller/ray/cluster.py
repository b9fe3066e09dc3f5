# SPDX-License-Identifier: Apache-2.0
"""Connecting to a Ray cluster, or starting one on this machine."""

import logging
import os
from pathlib import Path
from typing import Any

import ray

from verl.single_controller.ray.reachable import why_unreachable
from verl.single_controller.ray.resource_pool import ClusterError


def connect(address: str | None = None, *, num_cpus: int | None = None, num_gpus: int | None = None) -> bool:
    """Connect this process to Ray, unless it is connected; return whether a new cluster was started.

    The cluster is the first of: `address` (`host:port`, or "local" for a new one); the environment variable
    `RAY_ADDRESS`; the one that `ray start` started on this machine; a new one that ends with this process. A
    `num_cpus` or `num_gpus` always starts a new one.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if num_cpus is not None or num_gpus is not None:
        address = "local"
    address, origin = _find_cluster(address)
    is_new = address in (None, "local")
    if address is not None and not is_new and (problem := why_unreachable(address)) is not None:
        raise _cannot_join(address, origin, problem)
    options: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.ERROR}
    try:
        ray.init("local" if is_new else address, num_cpus=num_cpus, num_gpus=num_gpus, **options)
    except (ConnectionError, RuntimeError) as error:
        if is_new:
            raise ClusterError(f"Ray does not start on this machine: {error}") from error
        raise _cannot_join(address, origin, str(error)) from error
    return is_new


def started_cluster() -> str | None:
    """Return the address of the cluster that `ray start` started on this machine, if any."""
    file = _address_file()
    return file.read_text().strip() if file.exists() else None


def _find_cluster(address: str | None) -> tuple[str | None, str]:
    """Return the address of the cluster to join, and for errors its origin with how to avoid it."""
    if address is not None:
        return address, "named by the caller"
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"], "from `RAY_ADDRESS`; unset it to start a new cluster"
    file = _address_file()
    return started_cluster(), f"from {file}, written by `ray start`; `ray stop` removes the old cluster"


def _address_file() -> Path:
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray does
    return Path(folder, "ray", "ray_current_cluster")


def _cannot_join(address: str | None, origin: str, problem: str) -> ClusterError:
    return ClusterError(f"cannot join the Ray cluster at {address} ({origin}): {problem}")
