# SPDX-License-Identifier: Apache-2.0
"""Checks of a machine: GPUs and their torch, cores, memory, disks, network, Ray, sandbox."""

import os
import resource
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from verl.distributed.backends import BACKENDS, USUAL_GPU
from verl.distributed.gpus import Gpu, old_driver, unready_fabric
from verl.sandbox.outcome import REMEDY, Isolation, is_unsafe_allowed
from verl.sandbox.runner import detect
from verl.utils.host_memory import container_limit, machine_bytes
from verl.utils.version_check import NAME, find_version

GIB = 1 << 30
CONNECT_S = 5.0
MIN_SHARED_GIB = 4  # with less, decoded media are not kept in shared memory, see `data/media/cache.py`
MIN_DISK_GIB, LOW_DISK_GIB = 1, 50  # a checkpoint of a 3B model with its optimizer has some 40
MIN_FILES, LOW_FILES = 1024, 8192  # file descriptors: Ray and a store of shared files take hundreds
LOW_MEMORY_GIB = 4
FULL_FOR_RAY = 0.95  # share of a disk from which Ray treats it as full
SHOWN = BACKENDS[USUAL_GPU].visible[0]
USED_SHARE = 0.1  # of a GPU's memory: more belongs to another program
ATTENTION_PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4")


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


def check_gpus(gpus: Sequence[Gpu], device: str, num_wanted: int) -> list[Finding]:
    """Check that torch can compute on the driver's GPUs, that they are free, and `num_wanted` many."""
    try:
        import torch  # noqa: PLC0415 - a torch that cannot be imported is a finding
    except (ImportError, OSError) as error:
        return [Finding("gpus", Level.FAIL, f"torch: {error}", "reinstall torch, see the README")]
    module = torch.get_device_module(USUAL_GPU)
    if not gpus and not module.is_available():
        remedy = "set trainer.device=cpu, or install the driver"
        found = "the driver lists none: runs use the CPU"
        return [judge("gpus", found, remedy, fails=device == USUAL_GPU)]
    driver = gpus[0].driver if gpus else "unknown"
    found = f"{', '.join(gpu.name for gpu in gpus)}; driver {driver}, torch for CUDA {torch.version.cuda}"
    if device == "cpu":
        return [Finding("gpus", Level.OK, f"{found}; not used: trainer.device=cpu")]
    if torch.version.cuda is None:
        return [Finding("gpus", Level.FAIL, found, f"pip install '{NAME}[gpu]' into a new environment")]
    if not module.is_available():
        remedy = f"a newer driver (`nvidia-smi` shows its CUDA version), or unset {SHOWN}"
        reason = old_driver(driver, torch.version.cuda) or "torch sees none"
        return [Finding("gpus", Level.FAIL, f"{found}; {reason}", remedy)]
    findings = [Finding("gpus", Level.OK, found)]
    if module.device_count() < num_wanted:
        remedy = f"lower `trainer.n_gpus_per_node`, or unset {SHOWN}"
        found = f"{module.device_count()} usable, a run takes {num_wanted} on each node"
        findings.append(Finding("number of gpus", Level.FAIL, found, remedy))
    capabilities = {module.get_device_capability(index) for index in range(module.device_count())}
    return [*findings, _check_architectures(capabilities, module.get_arch_list()), _check_gpu_memory(gpus)]


def _check_architectures(capabilities: set[tuple[int, int]], built_for: Sequence[str]) -> Finding:
    unknown = sorted(each for each in capabilities if not is_built_for(each, built_for))
    found = f"compute capability {unknown or sorted(capabilities)}"
    if unknown:
        found += f", torch was built for {list(built_for)}"
    remedy = "a torch that was built for this GPU, or another GPU"
    return judge("gpu architecture", found, remedy, fails=unknown)


def is_built_for(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Return whether code built for `sm_80`, `compute_90`, ... runs on a GPU of this compute capability."""
    # Machine code (`sm`) runs on the same generation from its own version on; `compute` is compiled for any
    # later one. A letter after the number (`sm_90a`) means this version only.
    for name in built_for:
        kind, _, digits = name.partition("_")
        number = digits.rstrip("af")
        version = (int(number[:-1]), int(number[-1]))
        is_later = capability >= version and (kind == "compute" or capability[0] == version[0])
        if capability == version or (is_later and number == digits):
            return True
    return False


def _check_gpu_memory(gpus: Sequence[Gpu]) -> Finding:
    used = [
        f"{gpu.used_mib / 1024:.0f} of {gpu.memory_mib / 1024:.0f} GiB of GPU {index}"
        for index, gpu in enumerate(gpus)
        if gpu.used_mib > USED_SHARE * gpu.memory_mib
    ]
    sizes = ", ".join(f"{gpu.memory_mib / 1024:.0f} GiB" for gpu in gpus)
    found = f"in use: {', '.join(used)}" if used else f"free: {sizes or 'not reported by the driver'}"
    remedy = f"end the programs that `nvidia-smi` lists, or choose GPUs with {SHOWN}"
    return judge("gpu memory", found, remedy, warns=used)


def check_fabric() -> Finding:
    """Check that GPUs behind NVSwitch are joined; until then CUDA fails with error 802."""
    waiting = unready_fabric()
    remedy = "systemctl start nvidia-fabricmanager, in the driver's version"
    return judge("gpu fabric", f"state {waiting}" if waiting else "ready, or none", remedy, fails=waiting)


def check_compiler() -> Finding:
    """Check for what Triton builds the launchers of its kernels with; kernels themselves need no compiler."""
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [
        *([] if compiler else [f"no C compiler (CC={named})" if named else "no C compiler"]),
        *([] if header.is_file() else [f"no {header}"]),
    ]
    found = "; ".join(missing) or f"{compiler}; nvcc is not needed"
    remedy = "apt-get install gcc libc6-dev python3-dev, or those of your Python; Triton fails without them"
    return judge("c compiler", found, remedy, fails=missing)


def check_attention_packages() -> Finding:
    """Report which packages with attention kernels are installed; none is needed."""
    installed = [f"{name} {found}" for name in ATTENTION_PACKAGES if (found := find_version(name))]
    found = ", ".join(installed) or "none installed; torch's own FlashAttention 2 is used"
    return Finding("attention", Level.OK, found)
