# SPDX-License-Identifier: Apache-2.0
"""Record of a rank on its virtual GPU, by phase: memory, operations, collectives, copies and reads."""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]
ROUNDING = 512  # bytes; torch's CUDA allocator hands out multiples


class Collective(NamedTuple):
    """A collective as every rank of its group must issue it."""

    name: str  # of the operation
    shapes: tuple[tuple[int, ...], ...]  # of its tensors on this rank
    dtype: str
    ranks: tuple[int, int, int]  # number, first and last rank of its group
    bytes: int  # of its largest tensor on this rank


@dataclass
class PhaseTally:
    """One phase of a rank's work; bytes are of the device."""

    seconds: float = 0.0  # of the measurement
    start: int = 0  # bytes held when the phase began
    peak: int = 0  # most bytes held at once
    end: int = 0  # bytes held when it ended
    host_start: int = 0  # bytes in host memory, of tensors that have no values
    host_peak: int = 0
    flops: dict[str, int] = field(default_factory=dict)  # by operation
    collectives: list[Collective] = field(default_factory=list)
    copies: dict[str, list[int]] = field(default_factory=dict)  # "in" or "out", place: count and bytes
    # inside micro batches, by place in the sources: number for each micro batch
    micro_copies: list[dict[str, int]] = field(default_factory=list)  # from the host
    micro_reads: list[dict[str, int]] = field(default_factory=list)  # the host waits for the device
    given: list[tuple[str, int]] = field(default_factory=list)  # to the engine: name and bytes
    written: int = 0  # bytes of tensors that the rank writes to disk

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Memory:
    """Storages of tensors that one kind of memory holds."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until it is freed or resized."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._sizes:
            self.ignore(tensor)
            self.resize(storage)

    def ignore(self, tensor: torch.Tensor) -> None:
        """Count no bytes for the storage of a tensor: pages of a file."""
        storage = tensor.untyped_storage()
        self._sizes[id(storage)] = 0
        weakref.finalize(storage, self._forget, id(storage)).atexit = False

    def resize(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._sizes:
            size = -(-storage.nbytes() // ROUNDING) * ROUNDING
            self._grow(size - self._sizes[key])
            self._sizes[key] = size

    def reset_peak(self) -> None:
        self.peak = self.live

    def _forget(self, key: int) -> None:
        self._grow(-self._sizes.pop(key))

    def _grow(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


class Tally:
    """Counts of the phase that runs; filled by `VirtualGPU`."""

    def __init__(self) -> None:
        self.phases: dict[str, PhaseTally] = {}
        self.device, self.host = Memory(), Memory()
        self.phase = PhaseTally()
        self.in_micro_batch = False

    @contextmanager
    def measured(self, name: str) -> Iterator[PhaseTally]:
        self.reset_peak()
        outer = self.phase
        start = PhaseTally(start=self.device.live, host_start=self.host.live)
        self.phase = self.phases.setdefault(name, start)
        try:
            yield self.phase
        finally:
            self.reset_peak()
            self.phase.end = self.device.live
            self.phase = outer

    def reset_peak(self) -> None:
        # of the module: a phase keeps its own
        self.phase.peak = max(self.phase.peak, self.device.peak)
        self.phase.host_peak = max(self.phase.host_peak, self.host.peak)
        self.device.reset_peak()
        self.host.reset_peak()

    def begin_micro_batch(self) -> None:
        self.in_micro_batch = True
        self.phase.micro_copies.append({})
        self.phase.micro_reads.append({})

    def end_micro_batch(self) -> None:
        self.in_micro_batch = False

    def add_flops(self, name: str, count: int) -> None:
        self.phase.flops[name] = self.phase.flops.get(name, 0) + count

    def add_collective(self, collective: Collective) -> None:
        self.phase.collectives.append(collective)

    def add_copy(self, direction: str, size: int) -> None:
        """Count a copy between host and device: "in" to the device, "out" of it."""
        place = call_place()
        count = self.phase.copies.setdefault(f"{direction} {place}", [0, 0])
        count[0] += 1
        count[1] += size
        if self.in_micro_batch and direction == "in":
            _count(self.phase.micro_copies[-1], place)
        if direction == "out":
            self.add_read(place)

    def add_read(self, place: str | None = None) -> None:
        """Count a wait of the host for a value on the device."""
        if self.in_micro_batch:
            _count(self.phase.micro_reads[-1], place or call_place())


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def call_place() -> str:
    """Name the innermost function of the project that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT / "verl")) or "torch/distributed/fsdp" in path:
            name = "FSDP" if "torch/distributed/fsdp" in path else path.removeprefix(f"{ROOT}/")
            return f"{name}:{frame.f_code.co_qualname}" if name != "FSDP" else name
        frame = frame.f_back
    return "outside of the project"
