# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel strategies: how the ranks of a group share the work of a pass over the same rows.

    replicated            each rank runs some of the rows, whole, and encodes their media
    sharded encode        the same, but the media of all rows that run at a time are sharded over the ranks
    sharded encode + sp   every packed sequence is sharded over the ranks, and so are its media

The first two communicate nothing inside the layers. They are chosen where a rank needs no more memory than
for its shard of a sequence, and where they are estimated to be faster. Everything follows from token counts,
so the ranks agree without communication; results are the same in all three.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from verl.distributed.length_balancing import balance
from verl.workers.packing.micro_batches import MicroBatchLimit, RowCounts, Split, split_evenly, split_rows

# Time of a sharded sequence relative to the same work on whole rows. Two CPU processes with sequences of
# 1,536 to 4,096 tokens used 1.02 to 1.13 times the processor time, not counting waiting for each other.
SHARDING_OVERHEAD = 1.1
# The same for media that are encoded together. Gathering features took no measurable time, but every rank
# prepares the pixels of all of them, which costs more than it saves where the rows are nearly even.
SHARED_ENCODING_OVERHEAD = 1.2


class Strategy(StrEnum):
    """A way for the ranks of a sequence-parallel group to share their rows."""

    REPLICATED = "replicated"
    SHARDED_ENCODE = "sharded encode"
    SHARDED = "sharded encode + sp"


@dataclass(frozen=True)
class StrategyLimits:
    """Micro batch sizes that the options provide memory for."""

    sharded: MicroBatchLimit  # of a micro batch whose sequence is sharded
    whole_tokens: int  # of a sequence that one rank runs: its shard of the longest sharded one

    @classmethod
    def of(
        cls,
        counts: RowCounts,
        *,
        size: int,  # rows of a micro batch; with `dynamic_batching` the padded tokens of as many on one rank
        dynamic_batching: bool,
        prompt_width: int,  # tokens of the longest prompt that the options allow
        response_width: int,  # the same of responses
        ranks: int,
    ) -> "StrategyLimits":
        if dynamic_batching:
            tokens = size * (prompt_width + response_width)
            return cls(MicroBatchLimit(tokens=tokens * ranks), tokens)
        together = min(size, max(Counter(counts.group_ids).values(), default=1))
        longest = -(-size // together) * prompt_width + size * response_width
        return cls(MicroBatchLimit(rows=size), longest // ranks)


@dataclass(frozen=True)
class StrategyPlan:
    """The rows that each rank of a sequence-parallel group runs."""

    strategy: Strategy
    counts: RowCounts
    limit: MicroBatchLimit
    shares: tuple[tuple[int, ...], ...]  # the rows of each rank; one for all where sequences are sharded
    reason: str

    def splits(self, at_least: int = 1) -> list[Split]:
        return [split_rows(self.counts, rows, self.limit, at_least) for rows in self.shares]


def plan_strategies(
    counts: RowCounts, limits: StrategyLimits, ranks: int, strategies: Collection[Strategy] = tuple(Strategy)
) -> StrategyPlan:
    """Choose the fastest of the strategies that fit the limits; without `SHARDED`, rows run whole anyway."""

    def sharded(reason: str) -> StrategyPlan:
        everything = tuple(range(len(counts.lengths)))
        return StrategyPlan(Strategy.SHARDED, counts, limits.sharded, (everything,), reason)

    may_shard = Strategy.SHARDED in strategies
    if ranks == 1 or not counts.lengths or set(strategies) == {Strategy.SHARDED}:
        return sharded("the only strategy")
    longest = max(counts.lengths)
    if may_shard and longest > limits.whole_tokens:
        return sharded(f"a row of {longest} tokens, and a rank has memory for {limits.whole_tokens}")
    limit = MicroBatchLimit(tokens=limits.whole_tokens)
    shares = tuple(tuple(rows) for rows in deal_rows(counts, ranks))
    splits = [split_rows(counts, rows, limit) for rows in shares]
    (sequences,) = sharded("").splits()
    work = slowest(splits, counts.work), SHARDING_OVERHEAD * sum(map(counts.work, sequences)) / ranks
    reason = f"work of the slowest rank: {work[0]:.3g} with whole rows, {work[1]:.3g} with sharded sequences"
    if may_shard and work[1] < work[0]:
        return sharded(reason)
    return StrategyPlan(_encoding(counts, splits, strategies), counts, limit, shares, reason)


def deal_rows(counts: RowCounts, ranks: int) -> list[list[int]]:
    """Deal each rank rows of nearly equal work, splitting groups that share a prompt where it helps.

    Of up to `ranks` parts for the group with the most work, and fewer for others, the smallest number that
    minimizes the work of the busiest rank is taken.
    """
    groups = counts.group(range(len(counts.lengths)))
    work = [counts.work(rows) for rows in groups]
    best: tuple[int, list[list[int]]] | None = None
    for most_parts in range(1, ranks + 1):
        bundles: list[Sequence[int]] = []
        for rows, cost in zip(groups, work, strict=True):
            bundles += split_evenly(rows, min(len(rows), -(-cost * most_parts // max(work))))
        costs = [counts.work(bundle) for bundle in bundles]
        parts = balance(costs, ranks)
        busiest = max(sum(costs[item] for item in part) for part in parts)
        if best is None or busiest < best[0]:
            best = busiest, [[row for item in part for row in bundles[item]] for part in parts]
    assert best is not None, "there is a rank"
    return best[1]


def slowest(splits: Sequence[Split], cost: Callable[[Sequence[int]], float]) -> float:
    """Time of ranks that wait for each other after every micro batch: the sum of the largest costs."""
    rounds = itertools.zip_longest(*splits, fillvalue=())
    return sum(max(map(cost, parts)) for parts in rounds)


def _encoding(counts: RowCounts, splits: Sequence[Split], strategies: Collection[Strategy]) -> Strategy:
    # who encodes the media of whole rows: the rank that runs them, or all ranks together
    if Strategy.SHARDED_ENCODE not in strategies:
        return Strategy.REPLICATED
    if Strategy.REPLICATED not in strategies:
        return Strategy.SHARDED_ENCODE
    rounds = itertools.zip_longest(*splits, fillvalue=())
    together = sum(counts.encoded([row for part in parts for row in part]) for parts in rounds)
    shared = SHARED_ENCODING_OVERHEAD * together / len(splits)
    return Strategy.SHARDED_ENCODE if shared < slowest(splits, counts.encoded) else Strategy.REPLICATED
