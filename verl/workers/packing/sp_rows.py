# SPDX-License-Identifier: Apache-2.0
"""Tokens of a packed sequence whose outputs are wanted, on the ranks that hold them."""

from dataclasses import dataclass

from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import LocalRows, ShardPlan
from verl.distributed.ulysses import gather_rows


@dataclass(frozen=True, eq=False)
class SPRows:
    """M tokens of a packed sequence, m of them on this rank.

    Example::

        rows = SPRows.of(positions, plan, sp)
        log_probs = rows.gather(read(hidden[rows.local], rows.select(targets)))  # (M,), equal on all ranks
    """

    local: Tensor  # (m,) int64: positions among this rank's tokens
    shards: LocalRows | None  # None: this rank holds the whole sequence
    sp: SequenceParallel

    @classmethod
    def of(cls, positions: Tensor, plan: ShardPlan | None, sp: SequenceParallel) -> "SPRows":
        shards = None if plan is None else plan.rows(positions)
        return cls(positions if shards is None else shards.local, shards, sp)

    def select(self, values: Tensor) -> Tensor:
        """(M,) to (m,)."""
        if self.shards is None:
            return values
        start = sum(self.shards.counts[: self.sp.index])
        stop = start + self.shards.counts[self.sp.index]
        return values[(self.shards.order >= start) & (self.shards.order < stop)]

    def gather(self, values: Tensor) -> Tensor:
        """Gather the results of all ranks, (m,) to (M,); collective over the sequence-parallel group.

        All ranks must compute the same from the result: its gradient reaches only this rank's tokens.
        """
        if self.shards is None:
            return values
        return gather_rows(values, self.shards.counts, self.sp)[self.shards.order]
