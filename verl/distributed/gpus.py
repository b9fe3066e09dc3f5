# SPDX-License-Identifier: Apache-2.0
"""GPUs of this machine as reported by the driver, without importing torch."""

import glob
import subprocess
from typing import NamedTuple

QUERY = "name,memory.total,memory.used,driver_version"
TIMEOUT_S = 60
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")  # of CUDA, of CUDA in WSL, of ROCm


class Gpu(NamedTuple):
    """A GPU, such as `Gpu("NVIDIA H200", memory_mib=143771, used_mib=0, driver="570.86")`."""

    name: str
    memory_mib: int
    used_mib: int
    driver: str


def list_gpus() -> list[Gpu]:
    """Return the GPUs of this machine; empty if `nvidia-smi` is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return read_gpus(answer.stdout) if answer.returncode == 0 else []


def shows_gpu() -> bool:
    """Return whether the system shows a GPU to programs, even if no driver reports it."""
    return any(map(glob.glob, DEVICES)) or bool(list_gpus())


def read_gpus(answer: str) -> list[Gpu]:
    """Parse the output of `nvidia-smi`; unreported memory counts as 0."""
    gpus = []
    for line in filter(None, answer.splitlines()):
        name, total, used, driver = (cell.strip() for cell in line.split(","))
        gpus.append(
            Gpu(name, int(total) if total.isdigit() else 0, int(used) if used.isdigit() else 0, driver)
        )
    return gpus
