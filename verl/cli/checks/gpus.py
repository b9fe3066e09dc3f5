# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs, their driver and the torch that would use them."""

import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from verl.cli.checks.machine import Finding, Level, judge
from verl.distributed.backends import BACKENDS, USUAL_GPU
from verl.distributed.gpus import Gpu, old_driver, unready_fabric
from verl.utils.version_check import NAME, find_version

SHOWN = BACKENDS[USUAL_GPU].visible[0]
USED_SHARE = 0.1  # of a GPU's memory: more belongs to another program
ATTENTION_PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4")


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
    return [*findings, _check_architectures(capabilities, module.get_arch_list()), _check_memory(gpus)]


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


def _check_memory(gpus: Sequence[Gpu]) -> Finding:
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
