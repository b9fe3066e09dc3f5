# SPDX-License-Identifier: Apache-2.0
"""Which rows a device runs through the model at once.

Every rank of the group gets the same number of micro-batches, because each is a round of FSDP collectives.
A rank that has fewer ends with empty ones: `PackedForward` runs an empty micro-batch over one token that
nothing is asked of, so it takes part in the collectives and adds nothing to losses, gradients or results.

Where prompts are shared, the rows of a prompt stay together as far as the size of a micro-batch allows, and
the prompt's tokens count once.

Everything but `agreed_splits` is computed from token counts alone, alike on all ranks that know the rows.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed.length_balancing import balance, shared_workload
from verl.protocol import DataProto

Split = list[list[int]]  # the rows of each micro-batch


class Bundle(NamedTuple):
    """Rows that run together, and the tokens that they are."""

    rows: tuple[int, ...]
    tokens: int


class MicroBatchLimit(NamedTuple):
    """How much a micro-batch may hold; one of the two is given."""

    rows: int | None = None
    tokens: int | None = None  # padding not counted; a longer row stands alone


@dataclass(frozen=True)
class RowCounts:
    """What the division of a batch's rows depends on."""

    lengths: tuple[int, ...]  # (B,) tokens of each row
    prompts: tuple[int, ...]  # (B,) tokens of each row's prompt; zero where each row runs its own
    group_ids: tuple[int, ...]  # (B,) rows of the same share their prompt
    media: tuple[int, ...]  # (B,) tokens of each row that stand for media to be encoded
    prompt_ids: tuple[int, ...]  # (B,) rows with the same have the same media

    @classmethod
    def of(cls, batch: DataProto, share_prompt: bool, media: Sequence[int] | None = None) -> "RowCounts":
        """Count the tokens of a batch.

        Args:
            batch: Reads `attention_mask`; with `share_prompt` also `uid` and `response_mask`, without which
                no prompt is shared.
            share_prompt: Rows of the same `uid` share their prompt.
            media: (B,) tokens of each row that stand for media to be encoded; none by default.
        """
        lengths = tuple(batch.batch["attention_mask"].sum(-1).tolist())
        prompts, group_ids = (0,) * len(lengths), tuple(range(len(lengths)))
        prompt_ids = _prompt_ids(batch)
        if share_prompt and "uid" in batch.non_tensor_batch and "response_mask" in batch.batch:
            prompts, group_ids = tuple(prompt_lengths(batch)), prompt_ids
        return cls(lengths, prompts, group_ids, tuple(media or [0] * len(lengths)), prompt_ids)

    def among(self, rows: Sequence[int]) -> list[list[int]]:
        """Those of the rows that share a prompt, in the order of the groups."""
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.group_ids[row], []).append(row)
        return [groups[group] for group in sorted(groups)]

    def tokens(self, group: Sequence[int]) -> int:
        """Tokens of rows that share their prompt."""
        prompt = self.prompts[group[0]]
        return prompt + sum(self.lengths[row] - prompt for row in group)

    def work(self, rows: Sequence[int]) -> int:
        """Work of a forward pass over a line of these rows, see `workload`; the vision tower's left out."""
        groups = self.among(rows)
        return sum(
            shared_workload(self.prompts[group[0]], [self.lengths[row] for row in group]) for group in groups
        )

    def encoded(self, rows: Sequence[int]) -> int:
        """Tokens that the media of these rows make, each medium once."""
        return sum({self.prompt_ids[row]: self.media[row] for row in rows}.values())


def split_rows(counts: RowCounts, rows: Sequence[int], limit: MicroBatchLimit, at_least: int = 1) -> Split:
    """Divide rows into as few micro-batches as hold them, at least `at_least`; some may be empty."""
    if limit.tokens is None:
        assert limit.rows is not None, "one of the two is given"
        parts = _filled(counts.among(rows), limit.rows)
        return parts + [[] for _ in range(at_least - len(parts))]
    bundles = _bundles(counts, rows, limit.tokens)
    costs = [bundle.tokens for bundle in bundles]
    count = max(at_least, -(-sum(costs) // limit.tokens))
    while True:
        parts = balance(costs, count)
        if all(len(part) <= 1 or sum(costs[item] for item in part) <= limit.tokens for part in parts):
            split = [[row for item in part for row in bundles[item].rows] for part in parts]
            return split[::-1]  # the fullest first, so that memory peaks at once; empty ones last
        count += 1


def agreed_splits(
    divide: Callable[[int], list[Split]], group: dist.ProcessGroup | None = None
) -> list[Split]:
    """Divide so that every split of every rank has as many micro-batches; collective over `group`.

    Args:
        divide: Makes one or more splits, each of at least the given number of micro-batches.
        group: Ranks that must agree; all of them by default.
    """
    count = 1
    while True:
        splits = divide(count)
        needed = largest(max(map(len, splits)), group)
        if needed == count:
            return splits
        count = needed


def rows_of_prompts(batch: DataProto) -> list[list[int]]:
    """The rows of each prompt, by `uid`, in the order in which the prompts first appear.

    Rows of a batch without `uid` have each their own prompt.
    """
    rows: dict[object, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch.get("uid", range(len(batch)))):
        rows.setdefault(uid, []).append(row)
    return list(rows.values())


def _prompt_ids(batch: DataProto) -> tuple[int, ...]:
    """(B,) the number of each row's prompt, in the order of `rows_of_prompts`."""
    numbers = {row: number for number, rows in enumerate(rows_of_prompts(batch)) for row in rows}
    return tuple(numbers[row] for row in range(len(batch)))


def prompt_lengths(batch: DataProto) -> list[int]:
    """Tokens of each row's prompt; reads `attention_mask` and `response_mask`."""
    width = batch.batch["response_mask"].shape[1]
    return batch.batch["attention_mask"][:, :-width].sum(-1).tolist()


def _filled(bundles: list[list[int]], size: int) -> list[list[int]]:
    """Bundles one behind the other in parts of at most `size` rows; larger ones are cut evenly."""
    parts: list[list[int]] = []
    for rows in bundles:
        for piece in cut(rows, -(-len(rows) // size)):
            if not parts or len(parts[-1]) + len(piece) > size:
                parts.append([])
            parts[-1].extend(piece)
    return parts


def _bundles(counts: RowCounts, rows: Sequence[int], token_budget: int) -> list[Bundle]:
    """What is not divided: single rows, or the rows of a prompt in as few pieces as fit the budget."""
    bundles = []
    for group in counts.among(rows):
        for count in range(1, len(group) + 1):
            pieces = [Bundle(tuple(piece), counts.tokens(piece)) for piece in cut(group, count)]
            if all(piece.tokens <= token_budget for piece in pieces):
                break
        bundles.extend(pieces)
    return bundles


def cut(rows: Sequence[int], count: int) -> list[Sequence[int]]:
    """Rows in `count` pieces whose numbers differ by at most one."""
    bounds = [len(rows) * piece // count for piece in range(count + 1)]
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


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


def largest(value: int, group: dist.ProcessGroup | None = None) -> int:
    """The largest value of all ranks."""
    if not dist.is_initialized():
        return value
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(value, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor.item())
