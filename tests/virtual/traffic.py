# SPDX-License-Identifier: Apache-2.0
"""Bytes that a virtual rank receives in a phase, by their kind. Imports no torch."""

from tests.virtual.measure import PhaseReport


def received(phase: PhaseReport) -> float:
    """Bytes that a rank receives in its collectives of weights and gradients."""
    total = 0.0
    for name, _, _, (ranks, *_), size in phase.collectives:
        if "allgather" in name or "all_gather" in name or "reduce_scatter" in name:
            total += size * (ranks - 1) / ranks
        elif "allreduce" in name and size > 1 << 20:  # not the gradients' norm
            total += 2 * size * (ranks - 1) / ranks
        elif "broadcast" in name and size > 1 << 10:  # parts of experts, of which each rank sends as many
            total += size * (ranks - 1) / ranks
    return total


def exchanged(phase: PhaseReport) -> float:
    """Bytes that a rank receives in all-to-alls, of itself not."""
    sizes = [
        size * (ranks - 1) / ranks
        for name, _, _, (ranks, *_), size in phase.collectives
        if "alltoall" in name
    ]
    return sum(sizes)
