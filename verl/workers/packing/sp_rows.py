# SPDX-License-Identifier: Apache-2.0
"""Tokens of a line that something is read from, on the ranks that hold them."""

from dataclasses import dataclass

from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import LocalRows, ShardPlan
from verl.distributed.ulysses import gather_rows


@dataclass(frozen=True, eq=False)
class SPRows:
    """M tokens of a line; this rank reads m of them.

    Example::

        rows = SPRows.of(rows_before_responses, plan, sp)
        log_probs = rows.joined(read(hidden[rows.local], rows.own(targets)))  # (M,), the same on every rank
    """

    local: Tensor  # (m,) int64: places in this rank's tokens
    shares: LocalRows | None  # None: this rank holds the whole line
    sp: SequenceParallel

    @classmethod
    def of(cls, rows: Tensor, plan: ShardPlan | None, sp: SequenceParallel) -> "SPRows":
        """From places (M,) in the line; no plan where the line is not divided."""
        shares = None if plan is None else plan.rows(rows)
        return cls(rows if shares is None else shares.local, shares, sp)

    def own(self, values: Tensor) -> Tensor:
        """What belongs to this rank's rows: (M,) to (m,)."""
        if self.shares is None:
            return values
        start = sum(self.shares.counts[: self.sp.index])
        stop = start + self.shares.counts[self.sp.index]
        return values[(self.shares.order >= start) & (self.shares.order < stop)]

    def joined(self, values: Tensor) -> Tensor:
        """The results of all ranks: (m,) to (M,). Collective over the ranks of the line.

        Every rank must compute the same from the result: its gradient reaches this rank's rows only.
        """
        if self.shares is None:
            return values
        return gather_rows(values, self.shares.counts, self.sp)[self.shares.order]
