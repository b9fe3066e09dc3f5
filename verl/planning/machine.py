# SPDX-License-Identifier: Apache-2.0
"""The memory that a run is planned for: this machine's, or another's that is named."""

from dataclasses import dataclass

from verl.distributed.gpus import list_gpus
from verl.utils.host_memory import available_bytes

GIB = 1 << 30
RESERVE = 0.1  # share of memory that is planned for nothing: allocators hold freed pieces too small to use


@dataclass(frozen=True)
class Machine:
    """What each node has.

    Attributes:
        device: "cuda" or "cpu".
        device_bytes: Of one GPU; 0 on CPU.
        host_bytes: Of the node, for all processes together.
        name: Whose memory it is.
    """

    device: str
    device_bytes: int
    host_bytes: int
    name: str

    @property
    def usable_device(self) -> int:
        """Bytes of a GPU without the reserve."""
        return int((1 - RESERVE) * self.device_bytes)

    @property
    def usable_host(self) -> int:
        """Bytes of the node without the reserve."""
        return int((1 - RESERVE) * self.host_bytes)


def find_machine(device: str, memory_gb: float | None = None) -> Machine:
    """This machine, or one with another memory.

    Args:
        device: `trainer.device`: "auto", "cuda" or "cpu".
        memory_gb: GiB of one GPU of the other machine; on CPU, of its node.

    Raises:
        ValueError: The run needs a GPU, there is none, and no memory is given.
    """
    gpus = list_gpus() if device != "cpu" else []
    if device == "cpu" or (device == "auto" and not gpus):
        if memory_gb is not None:
            return Machine("cpu", 0, int(memory_gb * GIB), f"a node with {memory_gb:g} GiB")
        return Machine("cpu", 0, available_bytes(), "available on this machine")
    host = available_bytes()
    if memory_gb is not None:
        return Machine("cuda", int(memory_gb * GIB), host, f"a GPU with {memory_gb:g} GiB")
    free = min((gpu.memory_mib - gpu.used_mib for gpu in gpus), default=0) << 20
    if not free:
        raise ValueError("`trainer.device` (cuda): no GPU here tells its memory, say `--device-memory-gb=80`")
    return Machine("cuda", free, host, f"free on this machine's {gpus[0].name}")
