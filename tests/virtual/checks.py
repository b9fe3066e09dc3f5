# SPDX-License-Identifier: Apache-2.0
"""Rules that every phase on a virtual GPU keeps; a broken one is named with its phase and its place."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from tests.virtual.measure import PhaseReport

MAX_COPIES = 8  # from the host in a micro batch: its rows, layouts, images and their grids
SHARDING = "FSDP"  # with `enable_cpu_offload` it copies shards in, and waits for gradients on their way out


def problems(phases: Mapping[str, PhaseReport]) -> list[str]:
    return [problem for name, phase in phases.items() for problem in _phase_problems(name, phase)]


def _phase_problems(name: str, phase: PhaseReport) -> Iterator[str]:
    reads, copies = _of_project(phase.most_reads()), _of_project(phase.most_copies())
    if reads:
        yield f"{name}: in a micro batch the host waits for the device: {_listed(reads)}"
    if copies.total() > MAX_COPIES:
        yield f"{name}: in a micro batch the host sends {copies.total()} tensors: {_listed(copies)}"


def different_order(
    first: Mapping[str, PhaseReport], second: Mapping[str, PhaseReport], by_group: Collection[str] = ()
) -> str | None:
    """Name the first collective that two ranks do not issue alike; None if there is none.

    In phases of `by_group` only those of groups that both belong to must be alike.
    """
    common = _groups(first) & _groups(second)
    for name, phase in first.items():
        groups = common if name in by_group else None
        orders = phase.order(groups), second[name].order(groups)
        for index, pair in enumerate(zip(*orders, strict=False)):
            if pair[0] != pair[1]:
                return f"{name}: collective {index} is {pair[0]} on one rank and {pair[1]} on the other"
        if len(orders[0]) != len(orders[1]):
            return f"{name}: one rank issues {len(orders[0])} collectives and the other {len(orders[1])}"
    return None


def _groups(phases: Mapping[str, PhaseReport]) -> set[tuple[int, ...]]:
    return {tuple(ranks) for phase in phases.values() for _, _, _, ranks, _ in phase.collectives}


def _of_project(counts: Counter[str]) -> Counter[str]:
    return Counter({place: count for place, count in counts.items() if place != SHARDING})


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} in {place}" for place, count in counts.most_common())
