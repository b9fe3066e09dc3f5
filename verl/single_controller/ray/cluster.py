# SPDX-License-Identifier: Apache-2.0
"""Connecting to a Ray cluster, probed first, or starting one on this machine."""

import logging
import os
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray

from verl.single_controller.ray.resource_pool import ClusterError

CONNECT_S = 5.0  # for the TCP connection
ANSWER_S = 25.0  # for joining: a second, or several if the head is busy
IMPORT_S = 120.0  # for importing Ray, at worst from a cold network file system
ENVIRONMENT = {  # unless set by the user
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # idle ones have not the environment of a worker
}
ENDPOINT = re.compile(r"(?:\w+://)?\[?(?P<host>.+?)\]?:(?P<port>\d+)")
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in a submitted job, whose driver is this process, not the probe
NO_TOKEN = ("InvalidAuthToken", "find an authentication token", "no authentication token")
PROBE = """
import logging, sys
import ray
print("imported", flush=True)
ray.init(sys.argv[1], include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
"""


def connect(address: str | None = None, *, num_cpus: int | None = None, num_gpus: int | None = None) -> bool:
    """Connect this process to Ray, unless it is connected; return whether a new cluster was started.

    The cluster is the first of: `address` (`host:port`, or "local" for a new one); the environment variable
    `RAY_ADDRESS`; the one that `ray start` started on this machine; a new one that ends with this process. A
    `num_cpus` or `num_gpus` always starts a new one.
    """
    if ray.is_initialized():
        return False
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
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


def has_cluster() -> bool:
    """Return whether `connect` would use a cluster that is there, not start one."""
    return ray.is_initialized() or _find_cluster(None)[0] not in (None, "local")


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


def why_unreachable(address: str) -> str | None:
    """Return why a cluster does not let this machine join and what to do; None if it does.

    Takes about a second for a good cluster, CONNECT_S + ANSWER_S at most. `address` is as in `RAY_ADDRESS`;
    for `auto` the network check is skipped.
    """
    endpoint = ENDPOINT.fullmatch(address)
    if endpoint is not None:
        try:
            socket.create_connection((endpoint["host"], int(endpoint["port"])), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            return f"nothing answers there ({error}): it is down, or its port is not reachable from here"
    status, output = _try_to_join(address)
    if any(mark in output for mark in NO_TOKEN):
        return f"it requires a token, {_token_remedy()}"
    if status is None:
        last_words = output.rstrip().rpartition("\n")[2]
        return (
            f"something listens there but did not let this machine join within {ANSWER_S:g} s"
            f"{last_words and f' ({last_words})'}: this machine is not a node of it (join with"
            " `ray start --address=...`), it is too busy, or another program uses the port"
        )
    return None if status == 0 else output.rstrip().rpartition("\n")[2]


def _try_to_join(address: str) -> tuple[int | None, str]:
    """Return the exit status of a process that tried, None if it was killed, and its and Ray's output."""
    # Ray retries for minutes and cannot be interrupted, so another process tries and is killed if too slow.
    environment = {name: value for name, value in os.environ.items() if name != JOB}
    with subprocess.Popen(
        [sys.executable, "-c", PROBE, address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    ) as process:
        try:
            return _listen(process)
        finally:
            process.kill()


def _listen(process: subprocess.Popen) -> tuple[int | None, str]:
    """Read the process's output until it ends, times out or asks for a token."""
    assert process.stdout is not None, "it is a pipe"
    output, is_imported, deadline = "", False, time.monotonic() + IMPORT_S
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(process.stdout.fileno(), 1 << 16).decode(errors="replace")
        output += chunk
        if not chunk:
            return process.wait(), output
        if any(mark in output for mark in NO_TOKEN):
            break
        if not is_imported and "imported\n" in output:
            output, is_imported = output.partition("imported\n")[2], True
            deadline = time.monotonic() + ANSWER_S
    return None, output


def _token_remedy() -> str:
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = "RAY_AUTH_TOKEN" in os.environ or file.is_file()
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        state = "and this machine has a different one" if has_token else f"and there is none in {file}"
        return f"{state}: copy it from the machine that ran `ray start --head` to {file}"
    remedy = "" if has_token else f", with a copy of the token in {file}"
    return f"which this process does not send: `export RAY_AUTH_MODE=token`{remedy}"
