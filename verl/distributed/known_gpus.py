# SPDX-License-Identifier: Apache-2.0
"""Speeds and memory of GPUs from their vendors' data sheets; without torch.

To add a GPU, add a line to `known_gpus.csv`. The speed of a link is that of one direction; data sheets often
add both. `network` and `host_gib` are a GPU's share of the reference system that the sources there name.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

VARIANTS = {"MIG", "Laptop", "Max", "Ti", "SUPER", "D"}  # words that make a known name a different device


@dataclass(frozen=True)
class KnownGpu:
    """A GPU by its data sheet; bytes and operations in a second."""

    name: str  # its words are those of the driver's name
    peak: float  # dense bfloat16 products with float32 accumulation and without sparsity
    memory_gib: float  # as the driver reports it
    bandwidth: float  # of its memory
    link: float  # to another GPU of its node, by NVLink or PCIe
    pcie: float  # to host memory
    network: float  # to another node
    host_gib: int
    source: str

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


def _read(table: Path) -> tuple[KnownGpu, ...]:
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    gpus = []
    for row in csv.DictReader(lines):
        peak, memory = float(row["peak"]) * 1e12, float(row["memory_gib"])
        speeds = {name: float(row[name]) * 1e9 for name in ("bandwidth", "link", "pcie", "network")}
        host = int(row["host_gib"])
        gpus.append(KnownGpu(row["name"], peak, memory, **speeds, host_gib=host, source=row["source"]))
    return tuple(gpus)


KNOWN_GPUS = _read(Path(__file__).with_suffix(".csv"))


def find_gpu(device_name: str) -> KnownGpu | None:
    """Return the entry of a device by the driver's name for it; None for an unknown device or variant."""
    # Compared word by word, and the longest entry wins: "H20" is not "H200", "L40" is not "L40S".
    words = _words(device_name)
    known = [gpu for gpu in KNOWN_GPUS if _contains(words, _words(gpu.name))]
    if not known:
        return None
    best = max(known, key=lambda gpu: (len(_words(gpu.name)), len(gpu.name)))
    return None if VARIANTS & (set(words) - set(_words(best.name))) else best


def named_gpu(name: str) -> KnownGpu | None:
    """Return an entry by its own name in any case, with `-`, `_` or nothing between its words."""
    wanted = "".join(_words(name)).lower().removesuffix("sxm")
    for gpu in KNOWN_GPUS:
        # "A100-80GB" and "H100-80GB" name the size of the plain entry.
        plain = "".join(_words(gpu.name)).lower()
        if wanted in (plain, f"{plain}{round(gpu.memory_gib / 8) * 8}gb"):
            return gpu
    return None


def _words(name: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9]+", name)


def _contains(words: list[str], part: list[str]) -> bool:
    # "A100-SXM4-40GB" holds both words of "A100 40GB", though not one after the other.
    if part and part[-1].endswith("GB"):
        return part[-1] in words and _contains(words, part[:-1])
    return any(words[start : start + len(part)] == part for start in range(len(words) - len(part) + 1))
