# SPDX-License-Identifier: Apache-2.0
"""Assignment of sequences to ranks.

A mini batch holds the same prompts for any number of ranks; only its split over ranks follows the lengths.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from verl.distributed.length_balancing import balance, balance_groups, length_metrics, workload
from verl.protocol import DataProto, prompt_lengths
from verl.trainer.metrics import Metrics
from verl.trainer.rollouts.collector import Collected


@dataclass(frozen=True)
class Balancer:
    """Orders rows such that every rank gets similar work in each mini batch of an update."""

    dp_size: int
    group_size: int  # responses to a prompt
    mini_batch_prompts: Mapping[str, int]  # by the role that is updated
    share_prompt: bool = False  # responses run behind one copy of their prompt

    def spread(self, collected: Collected) -> Collected:
        """Order what a step collected for the actor's update; responses to a prompt stay together."""
        order, metrics = self._order(collected.batch, "actor", self.group_size)
        return Collected(
            collected.batch[order], collected.scoring.reorder(order), collected.metrics | metrics
        )

    def spread_rows(self, batch: DataProto, role: str = "actor") -> DataProto:
        """Order single sequences for the update of a role."""
        return batch[self._order(batch, role, group_size=1)[0]]

    def for_update(self, batch: DataProto, role: str) -> DataProto:
        """Cut a batch that is ordered for the actor into the mini batches of another role."""
        if self.mini_batch_prompts[role] == self.mini_batch_prompts["actor"]:
            return batch
        return self.spread_rows(batch[batch.batch["row_ids"].argsort(stable=True)], role)

    def _order(self, batch: DataProto, role: str, group_size: int) -> tuple[list[int], Metrics]:
        mini_batch_rows = self.mini_batch_prompts[role] * self.group_size
        return balance_over_ranks(batch, mini_batch_rows, group_size, self.dp_size, self.share_prompt)


def balance_over_ranks(
    batch: DataProto, mini_batch_rows: int, group_size: int, dp_size: int, share_prompt: bool = False
) -> tuple[list[int], Metrics]:
    """Find the order of rows in which the ranks' equal, contiguous shards cost about the same.

    Shard r holds its part of mini batch 0, then of mini batch 1, and so on. Groups of adjacent rows stay
    together where that is possible.

    Returns:
        Row numbers in the new order, rank 0's first, and `global_seqlen/*`.
    """
    lengths = batch.batch["attention_mask"].sum(-1).tolist()
    prompts = prompt_lengths(batch) if share_prompt else None
    shards: list[list[int]] = [[] for _ in range(dp_size)]
    for first in range(0, len(lengths), mini_batch_rows):
        rows = slice(first, first + mini_batch_rows)
        own = lengths[rows]
        # Groups stay whole only if every part gets the same number of them.
        if len(own) % (group_size * dp_size) == 0:
            groups = [row // group_size for row in range(len(own))]
            parts = balance_groups(own, groups, dp_size, None if prompts is None else prompts[rows])
        else:
            parts = balance([workload([length]) for length in own], dp_size, equal_size=True)
        for shard, part in zip(shards, parts, strict=True):
            shard.extend(first + row for row in sorted(part))
    return [row for shard in shards for row in shard], length_metrics(lengths, shards)
