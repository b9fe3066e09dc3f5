# SPDX-License-Identifier: Apache-2.0
"""Speeds and memory of GPUs from their vendors' data sheets; without torch.

To add a GPU, add a line to `KNOWN_GPUS`. The speed of a link is that of one direction; data sheets often add
both. `network` and `host_gib` are a GPU's share of the reference system that `SOURCES` names.
"""

import re
from dataclasses import dataclass

VARIANTS = {"MIG", "Laptop", "Max", "Ti", "SUPER", "D"}  # words that make a known name a different device

NVIDIA = "https://www.nvidia.com/en-us/data-center"
SOURCES = {
    "hopper": f"{NVIDIA}/h100/ and {NVIDIA}/h200/; system: https://docs.nvidia.com/dgx/dgxh100-user-guide/",
    "gh200": "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip",
    "ampere": f"{NVIDIA}/a100/; system: https://docs.nvidia.com/dgx/dgxa100-user-guide/",
    "blackwell": f"{NVIDIA}/dgx-b200/, {NVIDIA}/gb200-nvl72/, {NVIDIA}/dgx-b300/ and {NVIDIA}/gb300-nvl72/",
    "ada": f"{NVIDIA}/l40s/, {NVIDIA}/l40/ and {NVIDIA}/l4/; system: {NVIDIA}/products/ovx/",
    "small": f"{NVIDIA}/products/a40/, {NVIDIA}/products/a30-gpu/ and {NVIDIA}/products/a10-gpu/",
    "china": "NVIDIA's data sheets of A800, H800, H20 and L20, which have no page of their own",
    "cloud": "https://aws.amazon.com/ec2/instance-types/g5/",
    "rtx": "https://www.nvidia.com/en-us/geforce/graphics-cards/ and NVIDIA's white papers",
    "workstation": "https://www.nvidia.com/en-us/products/workstations/",
    "amd": "https://www.amd.com/en/products/accelerators/instinct.html",
}


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


KNOWN_GPUS = tuple(
    KnownGpu(name, peak * 1e12, memory, bandwidth * 1e9, link * 1e9, pcie * 1e9, net * 1e9, host, source)
    for name, peak, memory, bandwidth, link, pcie, net, host, source in (
        # name, 10**12 operations, GiB, then 10**9 bytes a second: memory, link, PCIe, network; GiB of a host
        ("GB300", 2500, 277, 8000, 900, 450, 100, 240, "blackwell"),
        ("B300", 2250, 268, 8000, 900, 64, 100, 256, "blackwell"),
        ("GB200", 2500, 184, 8000, 900, 450, 50, 240, "blackwell"),
        ("B200", 2250, 179, 8000, 900, 64, 50, 256, "blackwell"),
        ("GH200", 989, 95.0, 4000, 450, 450, 50, 480, "gh200"),
        ("H200", 989, 140.4, 4800, 450, 64, 50, 256, "hopper"),
        ("H200 NVL", 835, 140.4, 4800, 450, 64, 50, 256, "hopper"),
        ("H100", 989, 79.6, 3350, 450, 64, 50, 256, "hopper"),
        ("H100 PCIe", 756, 79.6, 2000, 64, 64, 25, 128, "hopper"),
        ("H100 NVL", 835, 93.6, 3900, 300, 64, 25, 128, "hopper"),
        ("H800", 989, 79.6, 3350, 200, 64, 50, 256, "china"),
        ("H800 PCIe", 756, 79.6, 2000, 64, 64, 25, 128, "china"),
        ("H20", 148, 95.6, 4000, 450, 64, 50, 256, "china"),
        ("A100", 312, 80.0, 2039, 300, 32, 25, 256, "ampere"),
        ("A100 40GB", 312, 39.6, 1555, 300, 32, 25, 128, "ampere"),
        ("A100 PCIe", 312, 80.0, 1935, 32, 32, 12.5, 128, "ampere"),
        ("A800", 312, 80.0, 2039, 200, 32, 25, 256, "china"),
        ("A40", 149.7, 45.0, 696, 32, 32, 12.5, 64, "small"),
        ("A30", 165, 24.0, 933, 32, 32, 12.5, 64, "small"),
        ("A10", 125, 22.5, 600, 32, 32, 12.5, 64, "small"),
        ("A10G", 70, 22.5, 600, 32, 32, 1.5, 96, "cloud"),
        ("L40S", 362, 45.0, 864, 32, 32, 25, 128, "ada"),
        ("L40", 181, 45.0, 864, 32, 32, 25, 128, "ada"),
        ("L20", 119.5, 45.0, 864, 32, 32, 25, 128, "china"),
        ("L4", 121, 22.5, 300, 32, 32, 12.5, 64, "ada"),
        ("RTX 5090", 209.5, 31.8, 1792, 64, 64, 1.5, 64, "rtx"),
        ("RTX 4090", 165.2, 24.0, 1008, 32, 32, 1.5, 64, "rtx"),
        ("RTX 3090", 71, 24.0, 936, 32, 32, 1.5, 64, "rtx"),
        ("RTX A6000", 154.8, 48.0, 768, 32, 32, 1.5, 64, "workstation"),
        ("RTX 6000 Ada", 364.2, 48.0, 960, 32, 32, 1.5, 64, "workstation"),
        ("MI300X", 1307, 191.7, 5300, 448, 64, 50, 256, "amd"),
        ("MI250X", 191.5, 64.0, 1638, 200, 32, 12.5, 64, "amd"),
    )
)


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
