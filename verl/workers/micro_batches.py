# SPDX-License-Identifier: Apache-2.0
"""Which rows a device runs through the model at once.

Every rank of the group gets the same number of micro-batches, because each is a round of FSDP collectives.
A rank that has fewer ends with empty ones: `PackedForward` runs an empty micro-batch over one token that
nothing is asked of, so it takes part in the collectives and adds nothing to losses, gradients or results.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.seqlen_balancing import balance


def split_micro_batches(
    batch: DataProto,
    micro_batch_size: int,
    token_budget: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """Divide a batch into micro-batches, equally many on every rank.

    Collective over `group`: waits for the slowest rank.

    Args:
        batch: Reads `attention_mask`.
        micro_batch_size: Rows in each, when there is no token budget.
        token_budget: Tokens in each, padding not counted; a longer row stands alone. None: by rows.
        group: Ranks that must agree on the number; all of them by default.

    Returns:
        Row indices; each row of the batch once. Some lists may be empty.
    """
    if token_budget is None:
        rows = list(range(len(batch)))
        parts = [rows[start : start + micro_batch_size] for start in range(0, len(rows), micro_batch_size)]
        count = _largest(len(parts), group)
        return parts + [[] for _ in range(count - len(parts))]

    lengths = batch.batch["attention_mask"].sum(-1).tolist()
    count = _largest(max(1, -(-sum(lengths) // token_budget)), group)
    while True:
        parts = balance(lengths, count)
        too_long = any(len(part) > 1 and sum(lengths[row] for row in part) > token_budget for part in parts)
        if not _largest(int(too_long), group):
            return parts[::-1]  # the fullest first, so that memory peaks at once; empty ones last
        count += 1


def dynamic_token_budget(batch: DataProto, micro_batch_size: int) -> int:
    """The tokens of `micro_batch_size` rows with their padding: EasyR1's measure for dynamic batching."""
    return micro_batch_size * batch.batch["attention_mask"].shape[-1]


def restore_order(results: Sequence[Tensor], parts: Sequence[Sequence[int]]) -> Tensor:
    """Join the results of micro-batches in the order of the batch they were taken from.

    Args:
        results: (rows, ...) of each micro-batch.
        parts: Which rows those were.

    Returns:
        (B, ...).
    """
    order = torch.tensor([row for part in parts for row in part], dtype=torch.int64)
    return torch.cat(list(results))[order.argsort()]


def _largest(value: int, group: dist.ProcessGroup | None) -> int:
    """The largest value of all ranks."""
    if not dist.is_initialized():
        return value
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(value, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor.item())
