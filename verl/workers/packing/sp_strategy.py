# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a line share the work of a pass over their rows.

They all have the same rows. What they may do with them:

    replicated            each runs some of the rows, whole, and encodes the media of these
    sharded encode        the same, but the media of all rows that run at a time are spread over the ranks
    sharded encode + sp   every line is divided over the ranks, and so are its media

The first two exchange nothing inside the layers. They are taken where a rank needs no more memory for it than
for its part of a divided line, and where they are estimated to be faster. All is computed from token counts,
so the ranks of a line agree without communication; the results are the same in all three.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from verl.distributed.length_balancing import balance
from verl.utils.rank_logger import get_logger
from verl.workers.packing.micro_batches import MicroBatchLimit, RowCounts, Split, cut, split_rows

logger = get_logger(__name__)

# Time of a divided line beside the same work on whole rows. Two CPU processes with lines of 1,536 to 4,096
# tokens used 1.02 to 1.13 times the processor time for it, waiting for each other not counted.
DIVISION_OVERHEAD = 1.1
# The same for media that are encoded together. Gathering features took no measurable time, but every rank
# prepares the pixels of all of them, which costs more than it saves where the rows are nearly even.
TOGETHER_OVERHEAD = 1.2


class Way(StrEnum):
    """What the ranks of a line do with their rows."""

    REPLICATED = "replicated"
    SHARDED_ENCODE = "sharded encode"
    DIVIDED = "sharded encode + sp"


@dataclass(frozen=True)
class StrategyLimits:
    """What the options provide memory for."""

    divided: MicroBatchLimit  # of a micro-batch whose line is divided
    whole_tokens: int  # of a line that one rank runs: its part of the longest divided one

    @classmethod
    def of(
        cls,
        counts: RowCounts,
        *,
        size: int,
        dynamic_batching: bool,
        prompt_width: int,
        response_width: int,
        ranks: int,
    ) -> "StrategyLimits":
        """The limits that a micro batch size sets.

        Args:
            counts: Of the batch.
            size: Rows of a micro-batch; with `dynamic_batching` their padded tokens are those of one rank.
            dynamic_batching: Fill micro-batches by tokens.
            prompt_width: Tokens of the longest prompt that the options allow.
            response_width: The same of responses.
            ranks: Of a line.
        """
        if dynamic_batching:
            tokens = size * (prompt_width + response_width)
            return cls(MicroBatchLimit(tokens=tokens * ranks), tokens)
        together = min(size, max(Counter(counts.group_ids).values(), default=1))
        longest = -(-size // together) * prompt_width + size * response_width
        return cls(MicroBatchLimit(rows=size), longest // ranks)


@dataclass(frozen=True)
class StrategyPlan:
    """What the ranks of a line run."""

    way: Way
    counts: RowCounts
    limit: MicroBatchLimit
    shares: tuple[tuple[int, ...], ...]  # the rows of each rank; where lines are divided one for all
    reason: str

    def splits(self, at_least: int = 1) -> list[Split]:
        """The micro-batches of each share, at least so many."""
        return [split_rows(self.counts, rows, self.limit, at_least) for rows in self.shares]


class StrategyPlanner:
    """Chooses for one model, and says so when it chooses something for the first time.

    Example::

        division = StrategyPlanner(ranks=4)
        plan = division.plan(counts, limits)  # plan.way is Way.REPLICATED
    """

    def __init__(self, ranks: int, ways: Collection[Way] = tuple(Way)) -> None:
        """Choose among some ways.

        Args:
            ranks: Of a line.
            ways: What may be chosen; all by default. Without `DIVIDED` rows run whole even if none fits.
        """
        self.ranks = ranks
        self.ways = frozenset(ways)
        self._said: set[Way] = set()

    def plan(self, counts: RowCounts, limits: StrategyLimits) -> StrategyPlan:
        """Choose for a pass over a batch; see `plan_strategies`."""
        plan = plan_strategies(counts, limits, self.ranks, self.ways)
        if self.ranks > 1 and plan.way not in self._said:
            self._said.add(plan.way)
            logger.info("ranks share sequences: way=%r because=%r", str(plan.way), plan.reason)
        return plan


def plan_strategies(
    counts: RowCounts, limits: StrategyLimits, ranks: int, ways: Collection[Way] = tuple(Way)
) -> StrategyPlan:
    """Choose what is fastest of what fits.

    Args:
        counts: Of the batch.
        limits: Of its micro-batches.
        ranks: Of a line.
        ways: What may be chosen.
    """

    def divided(reason: str) -> StrategyPlan:
        everything = tuple(range(len(counts.lengths)))
        return StrategyPlan(Way.DIVIDED, counts, limits.divided, (everything,), reason)

    may_divide = Way.DIVIDED in ways
    if ranks == 1 or not counts.lengths or set(ways) == {Way.DIVIDED}:
        return divided("there is no other")
    longest = max(counts.lengths)
    if may_divide and longest > limits.whole_tokens:
        return divided(f"a row of {longest} tokens, and a rank has memory for {limits.whole_tokens}")
    limit = MicroBatchLimit(tokens=limits.whole_tokens)
    shares = tuple(tuple(rows) for rows in deal_rows(counts, ranks))
    splits = [split_rows(counts, rows, limit) for rows in shares]
    (lines,) = divided("").splits()
    work = slowest(splits, counts.work), DIVISION_OVERHEAD * sum(map(counts.work, lines)) / ranks
    reason = f"work of the slowest rank: {work[0]:.3g} with whole rows, {work[1]:.3g} with divided lines"
    if may_divide and work[1] < work[0]:
        return divided(reason)
    return StrategyPlan(_encoding(counts, splits, ways), counts, limit, shares, reason)


def deal_rows(counts: RowCounts, ranks: int) -> list[list[int]]:
    """Give each rank rows of nearly the same work; rows that share a prompt are cut apart where it helps.

    The smallest number of cuts is taken that makes the busiest rank's work least, of up to `ranks` for the
    group with the most work and fewer for others.

    Returns:
        For each rank its rows, group after group; some may be empty.
    """
    groups = counts.among(range(len(counts.lengths)))
    work = [counts.work(rows) for rows in groups]
    best: tuple[int, list[list[int]]] | None = None
    for cuts in range(1, ranks + 1):
        pieces: list[Sequence[int]] = []
        for rows, cost in zip(groups, work, strict=True):
            pieces += cut(rows, min(len(rows), -(-cost * cuts // max(work))))
        costs = [counts.work(piece) for piece in pieces]
        parts = balance(costs, ranks)
        busiest = max(sum(costs[piece] for piece in part) for part in parts)
        if best is None or busiest < best[0]:
            best = busiest, [[row for piece in part for row in pieces[piece]] for part in parts]
    assert best is not None, "there is a rank"
    return best[1]


def slowest(splits: Sequence[Split], cost: Callable[[Sequence[int]], float]) -> float:
    """The time of ranks that wait for each other after every micro-batch: the sum of the largest costs."""
    rounds = itertools.zip_longest(*splits, fillvalue=())
    return sum(max(map(cost, parts)) for parts in rounds)


def _encoding(counts: RowCounts, splits: Sequence[Split], ways: Collection[Way]) -> Way:
    """Who encodes the media of whole rows: their own rank, or all ranks together."""
    if Way.SHARDED_ENCODE not in ways or Way.REPLICATED not in ways:
        return Way.SHARDED_ENCODE if Way.SHARDED_ENCODE in ways else Way.REPLICATED
    rounds = itertools.zip_longest(*splits, fillvalue=())
    together = sum(counts.encoded([row for part in parts for row in part]) for parts in rounds)
    shared = TOGETHER_OVERHEAD * together / len(splits)
    return Way.SHARDED_ENCODE if shared < slowest(splits, counts.encoded) else Way.REPLICATED
