# SPDX-License-Identifier: Apache-2.0
"""Tokens of a packed sequence whose outputs are wanted, on the ranks that hold them."""

from typing import NamedTuple

from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import ShardPlan
from verl.distributed.ulysses import gather_rows


class SPRows(NamedTuple):
    """M tokens of a packed sequence, m of them on this rank.

    Example::

        rows = SPRows.of(positions, plan, sp)  # on CPU
        targets = rows.select(targets)
        rows, targets = to_device((rows, targets), device)
        log_probs = rows.gather(read(hidden[rows.local], targets))  # (M,), equal on all ranks
    """

    local: Tensor  # (m,) int64: positions among this rank's tokens
    owned: Tensor | None  # (m,) int64: this rank's among the M; None: this rank holds the whole sequence
    order: Tensor | None  # (M,) int64: index of each after all ranks' results are concatenated
    counts: tuple[int, ...]  # of each rank
    sp: SequenceParallel

    @classmethod
    def of(cls, positions: Tensor, plan: ShardPlan | None, sp: SequenceParallel) -> "SPRows":
        if plan is None:
            return cls(positions, None, None, (), sp)
        rows = plan.rows(positions)
        return cls(rows.local, rows.owned, rows.order, rows.counts, sp)

    def select(self, values: Tensor) -> Tensor:
        """(M,) to (m,)."""
        return values if self.owned is None else values[self.owned]

    def gather(self, values: Tensor) -> Tensor:
        """Gather the results of all ranks, (m,) to (M,); collective over the sequence-parallel group.

        All ranks must compute the same from the result: its gradient reaches only this rank's tokens.
        """
        return values if self.order is None else gather_rows(values, self.counts, self.sp)[self.order]
