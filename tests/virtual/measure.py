# SPDX-License-Identifier: Apache-2.0
"""Ask a virtual cluster: memory, operations and communication of each phase of a rank. Imports no torch.

Example::

    with Cluster() as cluster:
        phases = cluster.measure("7b", Setup(reference=True), ranks=64)
        phases["update_actor"].peak  # bytes
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.virtual.shapes import PictureSetup, Setup

ROOT = Path(__file__).parents[2]


class VirtualClusterError(AssertionError):
    """A configuration does not run; the message names the error and ends with where it was raised."""


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a rank; bytes are of its device unless they say otherwise."""

    seconds: float  # of the measurement
    start: int  # bytes held when the phase began
    peak: int  # most bytes held at once
    end: int  # bytes held when it ended
    host_start: int  # bytes in host memory, of weights, moments and what is copied from the device
    host_peak: int
    flops: dict[str, int]  # by operation
    collectives: list[list[Any]]  # in order: name, shapes, dtype, (number, first, last) of ranks, bytes
    copies: dict[str, list[int]]  # by "in PLACE" or "out PLACE": number and bytes
    micro_copies: list[dict[str, int]]  # from the host, of each micro batch, by place
    micro_reads: list[dict[str, int]]  # waits of the host, of each micro batch, by place
    given: list[list[Any]]  # to the engine, in order: name and bytes
    written: int  # bytes of tensors that the rank writes to disk

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def collective_bytes(self) -> int:
        return sum(collective[4] for collective in self.collectives)

    def order(self, groups: Collection[tuple[int, ...]] | None = None) -> list[tuple[str, str, int]]:
        """Collectives, by default of all groups; sizes, left out, differ between ranks with other rows."""
        issued = [(name, dtype, tuple(ranks)) for name, _, dtype, ranks, _ in self.collectives]
        return [(name, dtype, ranks[0]) for name, dtype, ranks in issued if groups is None or ranks in groups]

    def most_reads(self) -> Counter[str]:
        return max(map(Counter, self.micro_reads), key=lambda counts: counts.total(), default=Counter())

    def most_copies(self) -> Counter[str]:
        return max(map(Counter, self.micro_copies), key=lambda counts: counts.total(), default=Counter())


class Cluster:
    """A process that runs configurations one after another, each in a fork."""

    def __enter__(self) -> "Cluster":
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.virtual.cluster"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
            cwd=ROOT,
        )  # fmt: skip
        self.seconds = 0.0  # of processor time, of the last configuration
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        self._process.wait()

    def measure(
        self, shape: str, setup: Setup | PictureSetup, ranks: int, mistake: str | None = None
    ) -> dict[str, PhaseReport]:
        """Run one rank's step; `mistake` names a function of `tests.virtual.mistakes` that breaks it.

        Raises:
            VirtualClusterError: The step does not run on a GPU.
        """
        spec = {"shape": shape, "setup": asdict(setup), "ranks": ranks, "mistake": mistake}
        spec["pictures"] = isinstance(setup, PictureSetup)
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(spec) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process ended", "trace": ""}')
        self.seconds = answer.get("seconds", 0.0)
        if "error" in answer:
            raise VirtualClusterError(f"{answer['error']}\n{answer['trace']}")
        return {name: PhaseReport(**phase) for name, phase in answer["phases"].items()}
