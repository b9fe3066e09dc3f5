# SPDX-License-Identifier: Apache-2.0
"""Checks of a machine: cores, memory, disks, network, Ray, sandbox."""

import os
import resource
import shutil
import socket
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from verl.sandbox.outcome import REMEDY, Isolation, is_unsafe_allowed
from verl.sandbox.runner import detect
from verl.utils.host_memory import container_limit, machine_bytes

GIB = 1 << 30
CONNECT_S = 5.0
MIN_SHARED_GIB = 4  # with less, decoded media are not kept in shared memory, see `data/media/cache.py`
MIN_DISK_GIB, LOW_DISK_GIB = 1, 50  # a checkpoint of a 3B model with its optimizer has some 40
MIN_FILES, LOW_FILES = 1024, 8192  # file descriptors: Ray and a store of shared files take hundreds
LOW_MEMORY_GIB = 4
FULL_FOR_RAY = 0.95  # share of a disk from which Ray treats it as full


class Level(StrEnum):
    """Severity of a finding."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """The result of one check: `Finding("open files", Level.WARN, "1024 at most", "ulimit -n 65536")`."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def judge(name: str, found: str, remedy: str, *, fails: object = False, warns: object = False) -> Finding:
    """Make a finding whose level follows from conditions; the remedy is left out if it is OK."""
    level = Level.FAIL if fails else Level.WARN if warns else Level.OK
    return Finding(name, level, found, remedy if fails or warns else "")


def check_threads() -> Finding:
    cores, text = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
    found = f"{cores} cores, OMP_NUM_THREADS={text or 'unset'}"
    if text is not None and not (text.isdigit() and int(text) > 0):
        return Finding("threads", Level.FAIL, found, "OMP_NUM_THREADS must be a number of threads: unset it")
    if text is None or int(text) <= cores:
        return Finding("threads", Level.OK, f"{found}; workers get cores / processes each")
    remedy = f"export OMP_NUM_THREADS=1, or at most {cores}: threads without a core slow others down"
    return Finding("threads", Level.WARN, found, remedy)


def check_memory() -> Finding:
    total, free = machine_bytes("MemTotal") / GIB, machine_bytes("MemAvailable") / GIB
    limit = container_limit()
    found = f"{free:.0f} of {total:.0f} GiB available"
    if limit is not None and limit / GIB < total:
        free, found = min(free, limit / GIB), f"{found}, the container may use {limit / GIB:.0f}"
    remedy = "end other programs; use only tiny models here"
    return judge("host memory", found, remedy, warns=free < LOW_MEMORY_GIB)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    remedy = "docker run --shm-size=16g, or --ipc=host; without it Ray and media use the disk, NCCL may fail"
    if not folder.is_dir():
        return Finding("shared memory", Level.WARN, f"no {folder}", remedy)
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.1f} GiB free in {folder}"
    return judge("shared memory", found, remedy, warns=free < MIN_SHARED_GIB)


def check_disk(folder: Path) -> Finding:
    """Check that there is room for checkpoints; `folder` need not exist yet."""
    name = "checkpoint disk"
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        remedy = "set `trainer.save_checkpoint_path` to a folder that you may write to"
        return Finding(name, Level.FAIL, f"{existing} cannot be written", remedy)
    free = shutil.disk_usage(existing).free / GIB
    found = f"{free:.0f} GiB free for {folder}"
    remedy = "make room, set `trainer.save_checkpoint_path` to a larger disk, or `trainer.save_limit`"
    return judge(name, found, remedy, fails=free < MIN_DISK_GIB, warns=free < LOW_DISK_GIB)


def check_temporary_folder() -> Finding:
    """Check the disk that Ray spills objects to."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.0f} GiB free in {folder}"
    is_full = usage.free < (1 - FULL_FOR_RAY) * usage.total
    return judge("temporary disk", found, "make room, or set RAY_TMPDIR to another disk", warns=is_full)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    remedy = f"ulimit -n {reachable}" if reachable > soft else "ask the administrator for a higher hard limit"
    fails, warns = (soft != resource.RLIM_INFINITY and soft < bound for bound in (MIN_FILES, LOW_FILES))
    return judge("open files", f"{soft} at most", remedy, fails=fails, warns=warns)


def check_loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return Finding("loopback", Level.FAIL, f"127.0.0.1: {error}", "ip link set lo up")
    return Finding("loopback", Level.OK, "127.0.0.1 answers")


def check_host_name(num_nodes: int) -> Finding:
    """Check that the machine's name resolves, and to an address that other nodes can reach."""
    name = socket.gethostname()
    remedy = f"add {name} with its address to /etc/hosts or the name service"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding("host name", Level.WARN, f"{name}: {error}", remedy)
    if num_nodes > 1 and address.startswith("127."):
        found = f"{name} is {address}, which {num_nodes} nodes cannot reach"
        return Finding("host name", Level.WARN, found, f"{remedy}, or set GLOO_SOCKET_IFNAME")
    return Finding("host name", Level.OK, f"{name} is {address}")


def check_ray() -> Finding:
    """Check that the cluster that a run would join answers; without one, a run starts its own."""
    try:
        from verl.single_controller.ray.cluster import started_cluster  # noqa: PLC0415 - without Ray, a finding
    except ImportError as error:
        return Finding("ray", Level.FAIL, str(error), "pip install 'ray>=2.50,<3'")
    origin = "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else "`ray start`"
    address = os.environ.get("RAY_ADDRESS") or started_cluster()
    if address in (None, "local"):
        return Finding("ray", Level.OK, "no cluster is started here: a run starts its own")
    if address == "auto":
        address = started_cluster() or "auto"
    found = f"{address}, from {origin}"
    remedy = "start the cluster again, or run `ray stop` and unset RAY_ADDRESS"
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        socket.create_connection((parts.hostname, parts.port or 0), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        return Finding("ray", Level.FAIL, f"{found}: {error}", remedy)
    return Finding("ray", Level.OK, f"{found} answers")


def check_sandbox() -> Finding:
    """Report what contains the programs that code rewards run."""
    isolation, why_not_better = detect()
    found = isolation if isolation is Isolation.NAMESPACES else f"{isolation}; {why_not_better}"
    if isolation is Isolation.NONE:
        unconfined = "programs run unconfined, as the environment allows"
        found = f"{unconfined if is_unsafe_allowed() else 'nothing contains a program'}: {why_not_better}"
    return judge("code sandbox", found, f"for code rewards only: {REMEDY}", warns=isolation is Isolation.NONE)
