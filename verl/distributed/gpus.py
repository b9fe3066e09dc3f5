# SPDX-License-Identifier: Apache-2.0
"""GPUs of this machine as reported by the driver, without importing torch."""

import glob
import subprocess
from typing import NamedTuple

from verl.distributed.backends import gpu_backends

QUERY = "name,memory.total,memory.used,driver_version"
TIMEOUT_S = 60
OLDEST_DRIVERS = {13: 580, 12: 525}  # by the generation of CUDA that torch was built for
FABRIC_READY = {"Completed", "N/A", "[N/A]", "Not Supported", "[Not Supported]"}


class Gpu(NamedTuple):
    """A GPU, such as `Gpu("NVIDIA H200", memory_mib=143771, used_mib=0, driver="570.86")`."""

    name: str
    memory_mib: int
    used_mib: int
    driver: str


def list_gpus() -> list[Gpu]:
    """Return the GPUs of this machine; empty if `nvidia-smi` is missing or fails."""
    return read_gpus(_ask_driver(QUERY))


def unready_fabric() -> list[str]:
    """Return the states of GPUs that wait for the fabric manager of NVSwitch; CUDA fails until then."""
    # Older drivers do not know the question; then there is no answer.
    states = (line.strip() for line in _ask_driver("fabric.state").splitlines())
    return [state for state in states if state and state not in FABRIC_READY]


def old_driver(driver: str, cuda: str) -> str | None:
    """Return why a driver such as "550.54" cannot run programs for CUDA "13.0", or None."""
    needed = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]), 0)
    found = driver.partition(".")[0]
    if found.isdigit() and int(found) < needed:
        return f"driver {driver} is older than {needed}, which CUDA {cuda} needs"
    return None


def _ask_driver(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def shows_gpu() -> bool:
    """Return whether the system shows a GPU to programs, even if no driver reports it."""
    files = (pattern for backend in gpu_backends() for pattern in backend.files)
    return any(map(glob.glob, files)) or bool(list_gpus())


def read_gpus(answer: str) -> list[Gpu]:
    """Parse the output of `nvidia-smi`; unreported memory counts as 0."""
    gpus = []
    for line in filter(None, answer.splitlines()):
        name, total, used, driver = (cell.strip() for cell in line.split(","))
        gpus.append(
            Gpu(name, int(total) if total.isdigit() else 0, int(used) if used.isdigit() else 0, driver)
        )
    return gpus
