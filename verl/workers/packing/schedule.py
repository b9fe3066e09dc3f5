# SPDX-License-Identifier: Apache-2.0
"""The micro-batch schedule of a pass over a rank's rows, and forward passes along it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from verl.distributed.ulysses import gather_rows
from verl.protocol import DataProto
from verl.utils.rank_logger import get_logger
from verl.workers.packing.media_inputs import BLANK, MediaRow, WholeRows, media_in_packing_order
from verl.workers.packing.micro_batches import RowCounts, agreed_splits
from verl.workers.packing.row_forward import RowForward
from verl.workers.packing.sp_strategy import Strategy, StrategyLimits, plan_strategies

logger = get_logger(__name__)

Results = TypeVar("Results", Tensor, dict[str, Tensor])


class MicroBatchSchedule:
    """The micro batches of this rank over a batch; every rank has the same number."""

    def __init__(self, forward: RowForward, batch: DataProto, *, size: int, dynamic_batching: bool) -> None:
        """Plan a pass over a batch; collective over all ranks. See `StrategyLimits.of` for `size`."""
        self.sp = sp = forward.sp
        media = forward.media_tokens(batch) if sp.size > 1 else None
        counts = RowCounts.of(batch, forward.shares_prompts, media)
        width = batch.batch["attention_mask"].shape[-1]
        response_width = batch.batch["responses"].shape[-1] if "responses" in batch.batch else 0
        widths = {"prompt_width": width - response_width, "response_width": response_width}
        limits = StrategyLimits.of(
            counts, size=size, dynamic_batching=dynamic_batching, ranks=sp.size, **widths
        )
        plan = plan_strategies(counts, limits, sp.size, forward.strategies)
        if sp.size > 1 and plan.strategy not in forward.logged:
            forward.logged.add(plan.strategy)
            logger.info("sequence-parallel strategy: strategy=%r reason=%r", str(plan.strategy), plan.reason)
        self.strategy, self.splits = plan.strategy, agreed_splits(plan.splits, sp.dp_group)

    def __len__(self) -> int:
        return len(self.splits[0])

    @property
    def is_whole(self) -> bool:
        """True if this rank runs rows of its own."""
        return self.strategy is not Strategy.SHARDED

    def micro_batches(self, batch: DataProto) -> Iterator[DataProto]:
        for parts in zip(*self.splits, strict=True):
            if not self.is_whole:
                yield batch[parts[0]]
                continue
            is_encoded_together = self.strategy is Strategy.SHARDED_ENCODE
            media = _media_of_round(batch, parts) if is_encoded_together else None
            yield WholeRows(media).attach_to(batch[parts[self.sp.index]])

    def join(self, results: Sequence[Tensor], device: torch.device | str) -> Tensor:
        """Join results (rows, ...) in the order of the batch: (B, ...) on CPU; collective."""
        own = torch.cat(list(results))
        if self.is_whole:
            counts = [sum(map(len, split)) for split in self.splits]
            own = gather_rows(own.to(device), counts, self.sp)
        rows = [row for split in self.splits for part in split for row in part]
        return own.cpu()[torch.tensor(rows, dtype=torch.int64).argsort()]


@torch.no_grad()
def run_in_micro_batches(
    forward: RowForward,
    batch: DataProto,
    function: Callable[[DataProto], Results],
    *,
    size: int,
    dynamic_batching: bool,
) -> Results:
    """Run a function over a batch in evaluation mode; collective over all ranks.

    `function` maps a micro batch of b rows to a tensor (b, ...), or to several, by the same names every time.
    Results are (B, ...) on CPU, in the order of the batch. See `StrategyLimits.of` for `size` and
    `dynamic_batching`.
    """
    forward.model.eval()
    schedule = MicroBatchSchedule(forward, batch, size=size, dynamic_batching=dynamic_batching)
    results = [function(micro_batch) for micro_batch in schedule.micro_batches(batch)]
    return tree_map(lambda *parts: schedule.join(parts, forward.device), *results)


def _media_of_round(batch: DataProto, parts: Sequence[Sequence[int]]) -> tuple[MediaRow, ...] | None:
    # a blank image for a rank without media; None if no rank has any
    shown = [media_in_packing_order(batch, [[row] for row in rows]) for rows in parts]
    if not any(shown):
        return None
    return tuple(row for rows in shown for row in rows or [BLANK])
