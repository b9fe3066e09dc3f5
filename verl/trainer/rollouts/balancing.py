# SPDX-License-Identifier: Apache-2.0
"""Which rank trains on which sequences.

A mini batch holds the same prompts whatever the number of ranks; only its split over ranks follows the
lengths.
"""

from verl.distributed.length_balancing import balance, balance_groups, length_metrics, workload
from verl.protocol import DataProto
from verl.trainer.metrics import Metrics
from verl.workers.packing.micro_batches import prompt_lengths


def balance_over_ranks(
    batch: DataProto, mini_batch_rows: int, group_size: int, dp_size: int, share_prompt: bool = False
) -> tuple[list[int], Metrics]:
    """Find the order of the rows in which the ranks' equal, contiguous shards cost about the same.

    Shard r holds its share of mini batch 0, then of mini batch 1, and so on.

    Args:
        batch: The sequences of a step, the responses to a prompt next to each other.
        mini_batch_rows: Sequences in a mini batch.
        group_size: Responses to a prompt.
        dp_size: Ranks that train on different sequences.
        share_prompt: The responses to a prompt run behind one copy of it; reads `response_mask`.

    Returns:
        The new order as row numbers, rank 0's first, and `global_seqlen/*`.
    """
    lengths = batch.batch["attention_mask"].sum(-1).tolist()
    prompts = prompt_lengths(batch) if share_prompt else None
    shards: list[list[int]] = [[] for _ in range(dp_size)]
    for first in range(0, len(lengths), mini_batch_rows):
        rows = slice(first, first + mini_batch_rows)
        own_prompts = None if prompts is None else prompts[rows]
        parts = share_rows(lengths[rows], group_size, dp_size, own_prompts)
        for shard, part in zip(shards, parts, strict=True):
            shard.extend(first + row for row in sorted(part))
    return [row for shard in shards for row in shard], length_metrics(lengths, shards)


def share_rows(
    lengths: list[int], group_size: int, parts: int, prompts: list[int] | None = None
) -> list[list[int]]:
    """Divide the sequences of a mini batch into parts of equal number and similar work.

    The responses to a prompt stay together where each part gets a whole number of prompts; otherwise single
    sequences are spread. `prompts` are the lengths of prompts that run once for their responses.
    """
    if len(lengths) % (group_size * parts) == 0:
        groups = [row // group_size for row in range(len(lengths))]
        return balance_groups(lengths, groups, parts, prompts)
    return balance([workload(length) for length in lengths], parts, equal_size=True)
