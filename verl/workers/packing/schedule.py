# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a pass over a rank's rows, as `line_division` plans it.

Ranks that run rows of their own do so in rounds: micro-batch number m of each is round m.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.ulysses import gather_rows
from verl.protocol import DataProto
from verl.workers.packing.micro_batches import agreed_splits, restore_order
from verl.workers.packing.sp_strategy import StrategyPlan, Way

BLANK: dict[str, Any] = {}  # stands for a blank image that is encoded where a rank's rows show nothing


@dataclass(frozen=True)
class WholeRows:
    """Said of a micro-batch: its rows are this rank's alone, and others run others at the same time."""

    media: tuple[dict[str, Any], ...] | None  # of all ranks' rows, to be encoded together; None: each its own

    @classmethod
    def of(cls, micro: DataProto) -> "WholeRows | None":
        """What is said of a micro-batch; nothing of one that all ranks of a line run."""
        return micro.meta_info.get("whole_rows")

    def attach_to(self, micro: DataProto) -> DataProto:
        """The micro-batch with this said of it."""
        return DataProto(micro.batch, micro.non_tensor_batch, micro.meta_info | {"whole_rows": self})


class MicroBatchSchedule:
    """The micro-batches of this rank over a batch, as many as every other rank has.

    Example::

        passes = MicroBatchSchedule(plan, sp, group)
        results = [function(micro) for micro in passes.micro_batches(batch)]
        joined = passes.joined(results)  # (B, ...), the same on every rank of the line
    """

    def __init__(self, plan: StrategyPlan, sp: SequenceParallel, group: dist.ProcessGroup | None) -> None:
        """Agree on the number; collective over all ranks.

        Args:
            plan: What the ranks of this line run.
            sp: This rank's place.
            group: The data-parallel ranks.
        """
        self.way, self.sp = plan.way, sp
        self.splits = agreed_splits(plan.splits, group)

    @property
    def is_whole(self) -> bool:
        """Whether this rank runs rows of its own."""
        return self.way is not Way.DIVIDED

    def micro_batches(self, batch: DataProto) -> Iterator[DataProto]:
        """The rows that this rank runs, round by round."""
        for parts in zip(*self.splits, strict=True):
            if not self.is_whole:
                yield batch[parts[0]]
                continue
            media = None
            if self.way is Way.SHARDED_ENCODE:
                media = _media_of_round(batch, parts)
            yield WholeRows(media).attach_to(batch[parts[self.sp.index]])

    def joined(self, results: Sequence[Tensor], device: torch.device | str) -> Tensor:
        """The results (rows, ...) of the micro-batches in the order of the batch: (B, ...) on CPU.

        Args:
            results: Of this rank's micro-batches.
            device: Where the ranks of a line exchange them.
        """
        own = torch.cat(list(results))
        if self.is_whole:
            counts = [sum(map(len, split)) for split in self.splits]
            own = gather_rows(own.to(device), counts, self.sp)
        rows = [row for split in self.splits for part in split for row in part]
        return restore_order([own.cpu()], [rows])


def has_media(row: dict[str, Any] | None) -> bool:
    """Whether a row shows images or videos."""
    return bool(row) and any(row.values())


def _media_of_round(batch: DataProto, parts: Sequence[Sequence[int]]) -> tuple[dict[str, Any], ...] | None:
    """What the ranks' rows of a round show, a blank image for those that show nothing; None if all do."""
    column = batch.non_tensor_batch.get("multi_modal_data")
    shown = (
        [[column[row] for row in rows if has_media(column[row])] for rows in parts]
        if column is not None
        else []
    )
    if not any(shown):
        return None
    return tuple(row for rows in shown for row in rows or [BLANK])
