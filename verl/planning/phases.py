# SPDX-License-Identifier: Apache-2.0
"""What a memory plan consists of: phases, each with the parts that are in memory at its fullest moment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl.planning.machine import Machine


class Item(NamedTuple):
    """A part of what a phase takes, in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Phase:
    """What is in memory at the fullest moment of a phase.

    Attributes:
        name: As in `timing_s/*`.
        device: Of one device; on CPU, of one process.
        host: Of host memory for each process of a node beside it.
        node: Of host memory once on a node.
        size_option: The micro batch size that it depends on, if it does.
        updates: The role of the model that it updates, if it does.
    """

    name: str
    device: tuple[Item, ...]
    host: tuple[Item, ...] = ()
    node: tuple[Item, ...] = ()
    size_option: str | None = None
    updates: str | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of one device."""
        return total(self.device)


@dataclass(frozen=True)
class MemoryPlan:
    """The phases of a run and the machine that they run on.

    Example::

        plan = Planner(planned_ppo, read_shape, machine)(config)
        plan.misfits()  # [] if all fits
    """

    phases: tuple[Phase, ...]
    machine: Machine
    processes: int  # on a node
    trained: tuple[str, ...] = ()  # what of which model is trained

    def node_bytes(self, phase: Phase) -> int:
        """Host memory of a node in a phase."""
        of_process = total(phase.host) + (total(phase.device) if self.machine.device == "cpu" else 0)
        return self.processes * of_process + total(phase.node)

    def is_within(self, phase: Phase) -> bool:
        """Whether a phase fits into what is there."""
        machine = self.machine
        on_device = machine.device == "cpu" or phase.device_bytes <= machine.usable_device
        return on_device and self.node_bytes(phase) <= machine.usable_host

    def misfits(self) -> list[Phase]:
        """The phases that do not fit."""
        return [phase for phase in self.phases if not self.is_within(phase)]


def total(items: Sequence[Item]) -> int:
    """Bytes of all of them."""
    return sum(item.size for item in items)
