# SPDX-License-Identifier: Apache-2.0
"""A cluster by name, such as `16x8xH200`, and the speeds of its devices and links."""

import re
from dataclasses import dataclass

from verl.distributed.backends import USUAL_GPU
from verl.distributed.known_gpus import KNOWN_GPUS, KnownGpu, find_gpu, named_gpu
from verl.planning.machine import GIB, Machine

FORM = re.compile(r"(?:(\d+)x)?(\d+)x([a-z].*)", re.IGNORECASE)
EXAMPLES = "`--on=8xH100` for a node, `--on=16x8xH200` for nodes x GPUs"
# Shares of a data sheet's speed that programs reach.
PRODUCT_SHARE = 0.72  # bfloat16 products of a training step
POWER_SHARE = 0.62  # the same where power lowers the clock: an H100 reaches 600 to 650 of 989
POWER_BOUND = 500e12  # peaks above it are
ATTENTION_SHARE = 0.40  # FlashAttention 2 on Hopper, of causal pairs; 0.55 to 0.6 on Ampere
FLASH3_SHARE = 0.60  # FlashAttention 3 on Hopper, forward and backward: 600 of 989
HOPPER = re.compile(r"G?H\d+")
MEMORY_SHARE = 0.80  # of elementwise kernels and of reading weights
LINK_SHARE = 0.75  # NCCL's rings over NVLink: 340 of 450 GB/s
SHARED_LINK_SHARE = 0.35  # over PCIe, whose root the GPUs of a node share
NETWORK_SHARE = 0.85
PCIE_SHARE = 0.75  # pinned memory, one direction, all GPUs of a node at once


@dataclass(frozen=True)
class Cluster:
    """Nodes with GPUs of one kind."""

    nodes: int
    gpus: int  # of a node
    gpu: KnownGpu
    has_flash3: bool = False  # installed, and used

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus

    @property
    def name(self) -> str:
        gpus = f"{self.gpus}x{self.gpu.name}"
        return gpus if self.nodes == 1 else f"{self.nodes}x{gpus}"

    @property
    def options(self) -> list[str]:
        """Arguments of a run on the whole cluster."""
        return ["trainer.device=cuda", f"trainer.nnodes={self.nodes}", f"trainer.n_gpus_per_node={self.gpus}"]

    @property
    def machine(self) -> Machine:
        """Memory of its nodes: the driver's figure for a GPU, and a usual host."""
        host = self.gpus * self.gpu.host_gib
        name = f"{self.gpu.name}, in a node with {host} GiB"
        return Machine(USUAL_GPU, self.gpu.memory_bytes, host * GIB, name)

    @property
    def products(self) -> float:
        share = POWER_SHARE if self.gpu.peak > POWER_BOUND else PRODUCT_SHARE
        return share * self.gpu.peak

    @property
    def attention(self) -> float:
        is_faster = self.has_flash3 and HOPPER.match(self.gpu.name)
        return (FLASH3_SHARE if is_faster else ATTENTION_SHARE) * self.gpu.peak

    @property
    def memory(self) -> float:
        return MEMORY_SHARE * self.gpu.bandwidth

    @property
    def pcie(self) -> float:
        return PCIE_SHARE * self.gpu.pcie

    def link(self, ranks: int, stride: int = 1) -> float:
        """Bytes a second that each of `ranks` ranks, every `stride`-th, receives in a collective."""
        share = LINK_SHARE if self.gpu.link > self.gpu.pcie else SHARED_LINK_SHARE
        within = share * self.gpu.link
        if (ranks - 1) * stride < self.gpus:
            return within
        # Rings leave and enter a node through the adapters of all GPUs that take part.
        adapters = max(1, self.gpus // stride)
        return min(within, NETWORK_SHARE * self.gpu.network * adapters)

    def exchange(self, ranks: int) -> float:
        """Bytes a second that each of `ranks` neighbors receives from the others in an all-to-all."""
        within, elsewhere = self.link(min(ranks, self.gpus)), ranks - self.gpus
        if elsewhere <= 0:
            return within
        # What ranks of other nodes send comes through the adapter of the GPU alone.
        return min(within, NETWORK_SHARE * self.gpu.network * (ranks - 1) / elsewhere)


def parse_cluster(text: str) -> Cluster:
    """Read `8xH100`, `16x8xH200` or `4xA100-40GB`.

    Raises:
        ValueError: The text has another form, or names no known device.
    """
    found = FORM.fullmatch(text.strip())
    nodes, gpus = (int(found[1] or 1), int(found[2])) if found else (0, 0)
    if found is None or nodes * gpus == 0:
        raise ValueError(f"`--on={text}` must name a number of GPUs and their kind: {EXAMPLES}")
    gpu = named_gpu(found[3])
    if gpu is None:
        known = ", ".join(entry.name.replace(" ", "-") for entry in KNOWN_GPUS)
        raise ValueError(f"`--on={text}`: `{found[3]}` is not a known device: {known}")
    return Cluster(nodes, gpus, gpu)


def cluster_here(device_name: str, nodes: int, gpus: int) -> Cluster | None:
    """Return the cluster of a run on GPUs of this name; None if their speeds are unknown."""
    gpu = find_gpu(device_name)
    return None if gpu is None else Cluster(nodes, gpus, gpu)
