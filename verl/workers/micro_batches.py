# SPDX-License-Identifier: Apache-2.0
"""Which rows a device runs through the model at once.

Every rank of the group gets the same number of micro-batches, because each is a round of FSDP collectives.
A rank that has fewer ends with empty ones: `PackedForward` runs an empty micro-batch over one token that
nothing is asked of, so it takes part in the collectives and adds nothing to losses, gradients or results.

Where prompts are shared, the rows of a prompt stay together as far as the size of a micro-batch allows, and
the prompt's tokens count once.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.seqlen_balancing import balance


class Bundle(NamedTuple):
    """Rows that run together, and the tokens that they are."""

    rows: tuple[int, ...]
    tokens: int


def split_micro_batches(
    batch: DataProto,
    micro_batch_size: int,
    token_budget: int | None = None,
    group: dist.ProcessGroup | None = None,
    share_prompt: bool = False,
) -> list[list[int]]:
    """Divide a batch into micro-batches, equally many on every rank.

    Collective over `group`: waits for the slowest rank.

    Args:
        batch: Reads `attention_mask`; with `share_prompt` also `uid` and `response_mask`, without which no
            prompt is shared.
        micro_batch_size: Rows in each, when there is no token budget.
        token_budget: Tokens in each, padding not counted; a longer row stands alone. None: by rows.
        group: Ranks that must agree on the number; all of them by default.
        share_prompt: Keep the rows of a prompt together and count its tokens once.

    Returns:
        Row indices; each row of the batch once. Some lists may be empty.
    """
    share_prompt = share_prompt and "uid" in batch.non_tensor_batch and "response_mask" in batch.batch
    if token_budget is None:
        bundles = rows_of_prompts(batch) if share_prompt else [[row] for row in range(len(batch))]
        parts = _filled(bundles, micro_batch_size)
        count = _largest(len(parts), group)
        return parts + [[] for _ in range(count - len(parts))]

    bundles = _bundles(batch, token_budget, share_prompt)
    costs = [bundle.tokens for bundle in bundles]
    count = _largest(max(1, -(-sum(costs) // token_budget)), group)
    while True:
        parts = balance(costs, count)
        too_long = any(len(part) > 1 and sum(costs[item] for item in part) > token_budget for part in parts)
        if not _largest(int(too_long), group):
            rows = [[row for item in part for row in bundles[item].rows] for part in parts]
            return rows[::-1]  # the fullest first, so that memory peaks at once; empty ones last
        count += 1


def rows_of_prompts(batch: DataProto) -> list[list[int]]:
    """The rows of each prompt, by `uid`, in the order in which the prompts first appear.

    Rows of a batch without `uid` have each their own prompt.
    """
    rows: dict[object, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch.get("uid", range(len(batch)))):
        rows.setdefault(uid, []).append(row)
    return list(rows.values())


def prompt_lengths(batch: DataProto) -> list[int]:
    """Tokens of each row's prompt; reads `attention_mask` and `response_mask`."""
    width = batch.batch["response_mask"].shape[1]
    return batch.batch["attention_mask"][:, :-width].sum(-1).tolist()


def _filled(bundles: list[list[int]], size: int) -> list[list[int]]:
    """Bundles one behind the other in parts of at most `size` rows; larger ones are cut evenly."""
    parts: list[list[int]] = []
    for rows in bundles:
        for piece in _cut(rows, -(-len(rows) // size)):
            if not parts or len(parts[-1]) + len(piece) > size:
                parts.append([])
            parts[-1].extend(piece)
    return parts


def _bundles(batch: DataProto, token_budget: int, share_prompt: bool) -> list[Bundle]:
    """What is not divided: single rows, or the rows of a prompt in as few pieces as fit the budget."""
    lengths = batch.batch["attention_mask"].sum(-1).tolist()
    if not share_prompt:
        return [Bundle((row,), length) for row, length in enumerate(lengths)]
    prompts = prompt_lengths(batch)
    bundles = []
    for rows in rows_of_prompts(batch):
        prompt = prompts[rows[0]]
        for count in range(1, len(rows) + 1):
            pieces = [
                Bundle(tuple(piece), prompt + sum(lengths[row] - prompt for row in piece))
                for piece in _cut(rows, count)
            ]
            if all(piece.tokens <= token_budget for piece in pieces):
                break
        bundles.extend(pieces)
    return bundles


def _cut(rows: Sequence[int], count: int) -> list[Sequence[int]]:
    """Rows in `count` pieces whose numbers differ by at most one."""
    bounds = [len(rows) * piece // count for piece in range(count + 1)]
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


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
