# SPDX-License-Identifier: Apache-2.0
"""Host memory available to new processes, on the machine or in its container."""

from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
LIMITS = (  # of a container: its limit and its current use
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that can be allocated without swapping."""
    free, limit = machine_bytes("MemAvailable", meminfo), container_limit(cgroup)
    return free if limit is None else min(free, max(0, limit - _used_by_container(cgroup)))


def machine_bytes(name: str, meminfo: Path = MEMINFO) -> int:
    lines = meminfo.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def container_limit(cgroup: Path = CGROUP) -> int | None:
    """Bytes that the container of this process may use; None is unlimited or unknown."""
    limits = (_read(cgroup / name) for name, _ in LIMITS)
    return next((int(text) for text in limits if text.isdigit()), None)


def _used_by_container(cgroup: Path) -> int:
    """Bytes in use, without cached files that the kernel drops first."""
    for _, name in LIMITS:
        text = _read(cgroup / name)
        if text.isdigit():
            stat = _read((cgroup / name).with_name("memory.stat")).splitlines()
            cached = [int(line.split()[1]) for line in stat if line.startswith("inactive_file ")]
            return int(text) - sum(cached)
    return 0


def _read(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""
