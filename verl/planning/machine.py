# SPDX-License-Identifier: Apache-2.0
"""A memory plan as data: the machine, the phases of a run, and what each phase holds at its peak."""

import os
import shutil
from dataclasses import dataclass, field
from importlib.util import find_spec

from verl.distributed.backends import USUAL_GPU
from verl.distributed.gpus import list_gpus
from verl.utils.host_memory import available_bytes

GIB = 1 << 30
RESERVE = 0.1  # share of memory left free: allocators hold freed pieces that are too small to use

Parts = dict[str, int]  # bytes by name


class UnknownMemoryError(ValueError):
    """No GPU reports its memory: drivers other than NVIDIA's are not asked."""


@dataclass(frozen=True)
class Machine:
    """Memory of each node."""

    device: str  # of `BACKENDS`
    device_bytes: int  # of one GPU; 0 on CPU
    host_bytes: int  # of a node, for all its processes
    name: str  # for reports
    no_compiler: str = ""  # what it lacks to compile for its GPUs

    @property
    def usable_device(self) -> int:
        return int((1 - RESERVE) * self.device_bytes)

    @property
    def usable_host(self) -> int:
        return int((1 - RESERVE) * self.host_bytes)


@dataclass(frozen=True)
class Phase:
    """Memory at the peak of a phase."""

    name: str  # as in `timing_s/*`
    device: Parts  # on each device; on CPU, in each process
    host: Parts = field(default_factory=dict)  # further host memory of each process
    node: Parts = field(default_factory=dict)  # host memory that a node needs once
    size_option: str | None = None  # the micro batch size that the phase depends on
    updated_role: str | None = None  # the model that the phase updates
    first_rank: Parts = field(default_factory=dict)  # further host memory of the first rank
    engine: Parts = field(default_factory=dict)  # what a rollout engine needs of its share of a GPU
    engine_share: int = 0  # bytes of a GPU

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def engine_fits(self) -> bool:
        return sum(self.engine.values()) <= self.engine_share


@dataclass(frozen=True)
class MemoryPlan:
    """The phases of a run and the machine that they run on."""

    phases: tuple[Phase, ...]
    machine: Machine
    processes: int  # on a node
    models: tuple[str, ...] = ()  # how much of each trained model is trained; the size of each served one

    def node_bytes(self, phase: Phase) -> int:
        process = sum(phase.host.values()) + (phase.device_bytes if self.machine.device == "cpu" else 0)
        return self.processes * process + sum(phase.first_rank.values()) + sum(phase.node.values())

    def fits(self, phase: Phase) -> bool:
        machine = self.machine
        fits_device = machine.device == "cpu" or phase.device_bytes <= machine.usable_device
        return fits_device and phase.engine_fits and self.node_bytes(phase) <= machine.usable_host

    def misfits(self) -> list[Phase]:
        return [phase for phase in self.phases if not self.fits(phase)]


def find_machine(device: str, memory_gb: float | None = None) -> Machine:
    """Describe this machine, or one with `memory_gb` GiB on each GPU (on CPU: on each node).

    Raises:
        UnknownMemoryError: The run needs a GPU, none reports its memory, and no memory is given.
    """
    gpus, host = list_gpus() if device != "cpu" else [], available_bytes()
    if device == "cpu" or (device == "auto" and not gpus):
        if memory_gb is not None:
            return Machine("cpu", 0, int(memory_gb * GIB), f"a node with {memory_gb:g} GiB")
        return Machine("cpu", 0, host, "available on this machine")
    kind = USUAL_GPU if device == "auto" else device
    if memory_gb is not None:
        return Machine(kind, int(memory_gb * GIB), host, f"a GPU with {memory_gb:g} GiB")
    free = min((gpu.memory_mib - gpu.used_mib for gpu in gpus), default=0) << 20
    if not free:
        raise UnknownMemoryError(
            f"`trainer.device` ({kind}): no GPU here reports its memory, add `--device-memory-gb=80`"
        )
    return Machine(kind, free, host, f"free on this machine's {gpus[0].name}", missing_compiler())


def missing_compiler() -> str:
    """Say what this machine lacks to compile for a GPU; empty if nothing."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
        return "there is no C compiler"
    return ""
