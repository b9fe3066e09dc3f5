# SPDX-License-Identifier: Apache-2.0
"""What is asked of a machine before a run: findings, each with a level and a remedy.

To add a question, write a function that returns a `Finding` and name it in `verl/cli/doctor.py`.
"""

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from verl.rewards.sandbox.outcome import REMEDY, Isolation, is_unsafe_allowed
from verl.rewards.sandbox.runner import detect
from verl.utils.host_memory import container_limit
from verl.utils.version_check import VLLM_PACKAGES, find_version

GIB = 1 << 30
MIN_SHARED_GIB = 4  # below it decoded media stay out of shared memory, see media_cache.py
MIN_DISK_GIB, LOW_DISK_GIB = 1, 50  # a checkpoint of a 3B model with its optimizer has some 40
MIN_FILES, LOW_FILES = 1024, 8192  # file descriptors: Ray and a store of shared files take hundreds
LOW_MEMORY_GIB = 4
FULL_FOR_RAY = 0.95  # share of a disk from which on Ray treats it as full


class Level(StrEnum):
    """How bad a finding is."""

    OK = "OK"
    WARN = "WARN"  # a run works, or some runs do
    FAIL = "FAIL"  # no run works


class Finding(NamedTuple):
    """The answer to one question.

    Example::

        Finding("open files", Level.WARN, "1024 at most", "ulimit -n 65536")
    """

    name: str
    level: Level
    found: str
    remedy: str = ""


def check_requirements() -> Finding:
    """Whether every package that this one needs is there in a version that it was made for."""
    try:
        needed = [Requirement(text) for text in requires("verl") or ()]
    except PackageNotFoundError:
        return Finding("packages", Level.WARN, "verl is not installed", "pip install -e '.[cpu]' or '.[gpu]'")
    needed = [need for need in needed if need.marker is None]  # those of extras have one
    wrong = unmet(needed)
    if wrong:
        names = " ".join(f"'{need.name}{need.specifier}'" for need in wrong)
        found = ", ".join(f"{need.name} {find_version(need.name) or 'is missing'}" for need in wrong)
        return Finding("packages", Level.FAIL, found, f"pip install {names}")
    return Finding("packages", Level.OK, f"{len(needed)} requirements are met")


def unmet(needed: Sequence[Requirement]) -> list[Requirement]:
    """The requirements that no installed package meets."""
    versions = {need: find_version(need.name) for need in needed}
    return [
        need
        for need, found in versions.items()
        if found is None or not need.specifier.contains(found, prereleases=True)
    ]


def check_engines() -> Finding:
    """Whether vLLM is installed once: its two packages overwrite each other's files."""
    both = {name: found for name in VLLM_PACKAGES if (found := find_version(name))}
    if len(both) > 1:
        remedy = f"pip uninstall -y {' '.join(both)}, then install the one for this machine"
        return Finding("vllm", Level.FAIL, f"{both} write the same files", remedy)
    if not both:
        remedy = "pip install -e '.[cpu]' or '.[gpu]'; without it only `worker.rollout.name=hf` works"
        return Finding("vllm", Level.WARN, "not installed", remedy)
    (name,) = both
    return Finding("vllm", Level.OK, f"{name} {both[name]}")


def check_threads() -> Finding:
    """Whether the threads of this process fit on the cores that it may use."""
    cores, text = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
    found = f"{cores} cores, OMP_NUM_THREADS={text or 'unset'}"
    if text is not None and not (text.isdigit() and int(text) > 0):
        return Finding("threads", Level.FAIL, found, "OMP_NUM_THREADS must be a number of threads: unset it")
    if text is not None and int(text) > cores:
        remedy = f"export OMP_NUM_THREADS=1, or at most {cores}: threads without a core spin and slow others"
        return Finding("threads", Level.WARN, found, remedy)
    return Finding("threads", Level.OK, f"{found}; workers get cores / processes each")


def check_memory() -> Finding:
    """Whether there is memory for a worker."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, free = kib["MemTotal"] / 2**20, kib["MemAvailable"] / 2**20
    limit = container_limit()
    found = f"{free:.0f} of {total:.0f} GiB available"
    if limit is not None and limit / GIB < total:
        free, found = min(free, limit / GIB), f"{found}, the container may use {limit / GIB:.0f}"
    if free < LOW_MEMORY_GIB:
        return Finding("host memory", Level.WARN, found, "end other programs; keep only tiny models here")
    return Finding("host memory", Level.OK, found)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Whether there is shared memory for Ray's objects and decoded media."""
    remedy = (
        "docker run --shm-size=16g, or --ipc=host; without it Ray and the media cache use the disk and"
        " NCCL may fail"
    )
    if not folder.is_dir():
        return Finding("shared memory", Level.WARN, f"no {folder}", remedy)
    free = shutil.disk_usage(folder).free / GIB
    level = Level.OK if free >= MIN_SHARED_GIB else Level.WARN
    return Finding(
        "shared memory", level, f"{free:.1f} GiB free in {folder}", remedy if level is Level.WARN else ""
    )


def check_disk(folder: Path) -> Finding:
    """Whether there is room for checkpoints; `folder` need not exist yet."""
    name = "checkpoint disk"
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        remedy = "set `trainer.save_checkpoint_path` to a folder that you may write to"
        return Finding(name, Level.FAIL, f"{there} cannot be written", remedy)
    free = shutil.disk_usage(there).free / GIB
    found = f"{free:.0f} GiB free for {folder}"
    remedy = "make room, set `trainer.save_checkpoint_path` to a larger disk, or `trainer.save_limit`"
    if free < LOW_DISK_GIB:
        return Finding(name, Level.FAIL if free < MIN_DISK_GIB else Level.WARN, found, remedy)
    return Finding(name, Level.OK, found)


def check_temporary_folder() -> Finding:
    """Whether Ray may use its folder: it refuses to spill objects to a disk that is 95% full."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.0f} GiB free in {folder}"
    if usage.free < (1 - FULL_FOR_RAY) * usage.total:
        return Finding("temporary disk", Level.WARN, found, "make room, or set RAY_TMPDIR to another disk")
    return Finding("temporary disk", Level.OK, found)


def check_open_files() -> Finding:
    """Whether a process may hold as many files and connections as Ray's and the loader's do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LOW_FILES:
        return Finding("open files", Level.OK, f"{soft} at most")
    reachable = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    level = Level.FAIL if soft < MIN_FILES else Level.WARN
    remedy = f"ulimit -n {reachable}" if reachable > soft else "ask the administrator for a higher hard limit"
    return Finding("open files", level, f"{soft} at most", remedy)


def check_loopback() -> Finding:
    """Whether processes of this machine can reach each other over 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return Finding("loopback", Level.FAIL, f"127.0.0.1: {error}", "ip link set lo up")
    return Finding("loopback", Level.OK, "127.0.0.1 answers")


def check_host_name(num_nodes: int) -> Finding:
    """Whether the machine's own name stands for an address, and one that other nodes of a run can reach."""
    name = socket.gethostname()
    remedy = f"give {name} its address in /etc/hosts or the name service"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding("host name", Level.WARN, f"{name}: {error}", remedy)
    if num_nodes > 1 and address.startswith("127."):
        found = f"{name} is {address}, which {num_nodes} nodes cannot reach"
        return Finding("host name", Level.WARN, found, f"{remedy}, or set GLOO_SOCKET_IFNAME")
    return Finding("host name", Level.OK, f"{name} is {address}")


def check_sandbox() -> Finding:
    """What contains the programs that code rewards run."""
    isolation, why_not_better = detect()
    if isolation is Isolation.NAMESPACES:
        return Finding("code sandbox", Level.OK, isolation)
    if isolation is Isolation.LANDLOCK:
        return Finding("code sandbox", Level.OK, f"{isolation}; {why_not_better}")
    found = f"nothing contains a program: {why_not_better}"
    if is_unsafe_allowed():
        found = f"programs run unconfined, as the environment says: {why_not_better}"
    return Finding("code sandbox", Level.WARN, found, f"for code rewards only: {REMEDY}")
