# SPDX-License-Identifier: Apache-2.0
"""Balance sequences over ranks by estimated work (Karmarkar-Karp differencing).

Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning" (Berkeley, UCB/CSD-82-113, 1983),
generalized to any number of parts.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence

# Work of a token outside attention, in units of one attended token: 6 x hidden size of 4096.
LINEAR_WORK = 24576

Part = tuple[float, tuple[int, ...]]  # sum of costs, items


def workload(lengths: Sequence[int], prompt: int = 0) -> int:
    """Estimate the work of a forward pass over sequences that share the tokens of their prompt.

    It is linear in tokens, quadratic for attention.
    """
    responses = sum(length - prompt for length in lengths)
    attention = prompt**2 + sum(length**2 - prompt**2 for length in lengths)
    return LINEAR_WORK * (prompt + responses) + attention


def balance(costs: Sequence[float], parts: int, equal_size: bool = False) -> list[list[int]]:
    """Divide items into parts with similar sums of costs; return the items of each part, ascending."""
    if parts < 1 or (equal_size and len(costs) % parts):
        raise ValueError(f"{len(costs)} items cannot be divided into {parts} parts of equal size")
    if not costs:
        return [[] for _ in range(parts)]
    # Merge the two divisions with the widest spread, the largest parts of one with the smallest of the other,
    # until one division is left.
    order = sorted(range(len(costs)), key=lambda item: (costs[item], item))
    step = parts if equal_size else 1
    heap = []
    for start in range(0, len(order), step):
        division: list[Part] = [(0, ())] * (parts - step)
        division += [(costs[item], (item,)) for item in order[start : start + step]]
        heapq.heappush(heap, (_negative_spread(division), start, division))
    while len(heap) > 1:
        _, serial, widest = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = sorted(
            (left + right, a + b) for (left, a), (right, b) in zip(widest, reversed(second), strict=True)
        )
        heapq.heappush(heap, (_negative_spread(merged), serial, merged))
    return [sorted(items) for _, items in heap[0][2]]


def _negative_spread(division: list[Part]) -> float:
    return division[0][0] - division[-1][0]


def balance_groups(
    lengths: Sequence[int],
    groups: Sequence[object],  # group of each sequence; any hashable
    parts: int,
    prompts: Sequence[int] | None = None,  # prompt lengths, if the sequences of a group share their prompt
) -> list[list[int]]:
    """Divide sequences over ranks: equal numbers, similar work, and no group split."""
    rows_of: dict[object, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    members = list(rows_of.values())
    sizes = {len(rows) for rows in members}
    if len(sizes) > 1 or len(members) % parts:
        raise ValueError(
            f"{len(members)} groups of {sorted(sizes)} sequences cannot be divided over {parts} ranks"
            " as whole groups"
        )
    shared = prompts or [0] * len(lengths)
    costs = [workload([lengths[row] for row in rows], shared[rows[0]]) for rows in members]
    return [
        [row for group in part for row in members[group]] for part in balance(costs, parts, equal_size=True)
    ]


def split_evenly(costs: Sequence[int], parts: int) -> list[int]:
    """Split items into contiguous spans so that the largest sum of costs is minimal.

    Returns `parts + 1` bounds: the first item of each span, and the number of items. Later spans may be
    empty.
    """
    limits = range(max([-(-sum(costs) // parts), *costs]), sum(costs) + 1)
    least = bisect_left(limits, True, key=lambda limit: len(_span_starts(costs, limit)) <= parts)
    starts = _span_starts(costs, limits[least])
    return starts + [len(costs)] * (parts + 1 - len(starts))


def _span_starts(costs: Sequence[int], limit: int) -> list[int]:
    """Start a new span before the sum exceeds `limit`."""
    starts, total = [0], 0
    for item, cost in enumerate(costs):
        total += cost
        if total > limit:
            starts.append(item)
            total = cost
    return starts


def length_metrics(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    per_rank = len(lengths) // len(parts)  # before balancing, ranks take equal numbers in batch order
    before = [sum(lengths[start * per_rank : (start + 1) * per_rank]) for start in range(len(parts))]
    after = [sum(lengths[row] for row in part) for part in parts]
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": sum(lengths) / len(parts),
    }
