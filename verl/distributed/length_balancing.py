# SPDX-License-Identifier: Apache-2.0
"""Divide sequences into parts of nearly equal work, by the Karmarkar-Karp differencing method.

Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning" (Berkeley, UCB/CSD-82-113, 1983),
in the form for any number of parts.
"""

import heapq
from collections.abc import Sequence

LINEAR_WORK = (
    24576  # work of a token outside attention, in units of one attended token: 6 x hidden size of 4096
)


Part = tuple[float, tuple[int, ...]]  # a part: its sum of costs, and its items


def workload(length: int) -> int:
    """Work of a forward pass over a sequence: linear in tokens, and quadratic for attention."""
    return LINEAR_WORK * length + length * length


def shared_workload(prompt: int, lengths: Sequence[int]) -> int:
    """Work of a forward pass over sequences of `lengths` that share the tokens of their prompt."""
    responses = sum(length - prompt for length in lengths)
    attention = prompt**2 + sum(length**2 - prompt**2 for length in lengths)
    return LINEAR_WORK * (prompt + responses) + attention


def balance(costs: Sequence[float], parts: int, equal_size: bool = False) -> list[list[int]]:
    """Divide items into parts whose sums of costs are close.

    The two divisions with the widest spread are merged, the largest parts of one with the smallest of the
    other, until a single division is left. The result depends on nothing but the arguments.

    Args:
        costs: Of each item, not negative.
        parts: How many; more than items leaves some empty.
        equal_size: Give every part the same number of items.

    Returns:
        The items' indices, ascending in each part.

    Raises:
        ValueError: Equal sizes are asked for and the items do not divide by the parts.
    """
    if parts < 1 or (equal_size and len(costs) % parts):
        raise ValueError(f"{len(costs)} items cannot be divided into {parts} parts of equal size")
    if not costs:
        return [[] for _ in range(parts)]
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
    lengths: Sequence[int], groups: Sequence[object], parts: int, prompts: Sequence[int] | None = None
) -> list[list[int]]:
    """Divide sequences over ranks so that each gets as many, the work is close, and no group is split.

    Args:
        lengths: Tokens of each sequence.
        groups: Which group each sequence belongs to; any hashable.
        parts: Number of ranks.
        prompts: Tokens of each sequence's prompt, where the sequences of a group share it; None where each
            runs its own.

    Returns:
        For each rank the indices of its sequences, group after group.

    Raises:
        ValueError: Groups differ in size, or do not divide by the ranks.
    """
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
    if prompts is None:
        costs = [sum(workload(lengths[row]) for row in rows) for rows in members]
    else:
        costs = [shared_workload(prompts[rows[0]], [lengths[row] for row in rows]) for rows in members]
    return [
        [row for group in part for row in members[group]] for part in balance(costs, parts, equal_size=True)
    ]


def cut_evenly(costs: Sequence[int], parts: int) -> list[int]:
    """Cut a sequence of items into stretches so that the largest sum of costs is as small as it can be.

    Args:
        costs: Of each item, in order; not negative.
        parts: How many; later ones may be empty.

    Returns:
        (parts + 1,) the first item of each stretch, and the number of items.
    """
    low, high = max([-(-sum(costs) // parts), *costs]), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(_stretches(costs, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    starts = _stretches(costs, low)
    return starts + [len(costs)] * (parts + 1 - len(starts))


def _stretches(costs: Sequence[int], limit: int) -> list[int]:
    """Where stretches begin that are as long as their sum, at most `limit`, allows; one at least."""
    starts, total = [0], 0
    for item, cost in enumerate(costs):
        total += cost
        if total > limit:
            starts.append(item)
            total = cost
    return starts


def length_metrics(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Tokens for each rank, as the batch came and as `parts` divide it: `global_seqlen/*`."""
    per_rank = len(lengths) // len(parts)
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
