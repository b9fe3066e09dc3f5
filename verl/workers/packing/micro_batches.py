# SPDX-License-Identifier: Apache-2.0
"""Divide a batch into micro batches: the rows that one device runs through the model at once.

All ranks of a group get the same number, because each micro batch is a round of FSDP collectives; ranks with
fewer rows end with empty ones. Rows that share a prompt stay together as far as the limit allows. Except for
`agreed_splits`, everything follows from token counts, so ranks with the same rows agree.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from verl.data.media.references import media_key
from verl.distributed.device import group_device
from verl.distributed.length_balancing import balance, workload
from verl.protocol import DataProto, prompt_lengths
from verl.workers.packing.packed_batch import group_equal_prompts

Split = list[list[int]]  # the rows of each micro batch


class MicroBatchLimit(NamedTuple):
    """The size of a micro batch; one of the two is set."""

    rows: int | None = None
    tokens: int | None = None  # without padding; a longer row runs alone


@dataclass(frozen=True)
class RowCounts:
    """Token counts of a batch's rows."""

    lengths: tuple[int, ...]  # (B,)
    prompts: tuple[int, ...]  # (B,) tokens of each row's prompt; zero where prompts are not shared
    group_ids: tuple[int, ...]  # (B,) rows with the same id share their prompt
    media: tuple[int, ...]  # (B,) tokens of each row's media that must be encoded
    prompt_ids: tuple[int, ...]  # (B,) rows with the same id have the same media

    @classmethod
    def of(cls, batch: DataProto, share_prompt: bool, media: Sequence[int] | None = None) -> "RowCounts":
        # without `uid` or `responses` no prompt is shared
        lengths = tuple(batch.batch["attention_mask"].sum(-1).tolist())
        prompts, group_ids = (0,) * len(lengths), tuple(range(len(lengths)))
        prompt_ids = _numbers(rows_by_prompt(batch))
        if share_prompt and "uid" in batch.non_tensor_batch and "responses" in batch.batch:
            prompts, group_ids = tuple(prompt_lengths(batch)), _numbers(rows_sharing_prompts(batch))
        return cls(lengths, prompts, group_ids, tuple(media or [0] * len(lengths)), prompt_ids)

    def group(self, rows: Sequence[int]) -> list[list[int]]:
        """Group rows that share a prompt, in the order of the groups."""
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.group_ids[row], []).append(row)
        return [groups[group] for group in sorted(groups)]

    def tokens(self, group: Sequence[int]) -> int:
        prompt = self.prompts[group[0]]
        return prompt + sum(self.lengths[row] - prompt for row in group)

    def work(self, rows: Sequence[int]) -> int:
        """Work of a forward pass over these rows, packed, without the vision tower; see `workload`."""
        groups = self.group(rows)
        return sum(workload([self.lengths[row] for row in group], self.prompts[group[0]]) for group in groups)

    def encoded(self, rows: Sequence[int]) -> int:
        # each medium counts once
        return sum({self.prompt_ids[row]: self.media[row] for row in rows}.values())


def split_rows(counts: RowCounts, rows: Sequence[int], limit: MicroBatchLimit, at_least: int = 1) -> Split:
    """Divide rows into as few micro batches as the limit allows, at least `at_least`; some may be empty."""
    if limit.tokens is None:
        assert limit.rows is not None, "one of the two is set"
        parts = _fill(counts.group(rows), limit.rows)
        return parts + [[] for _ in range(at_least - len(parts))]
    bundles = _bundles(counts, rows, limit.tokens)
    costs = [counts.tokens(bundle) for bundle in bundles]
    count = max(at_least, -(-sum(costs) // limit.tokens))
    while True:
        parts = balance(costs, count)
        if all(len(part) <= 1 or sum(costs[item] for item in part) <= limit.tokens for part in parts):
            split = [[row for item in part for row in bundles[item]] for part in parts]
            return split[::-1]  # the fullest first, so that memory peaks at once; empty ones last
        count += 1


def agreed_splits(
    divide: Callable[[int], list[Split]], group: dist.ProcessGroup | None = None
) -> list[Split]:
    """Call `divide(at_least)` until all splits of all ranks in `group` have the same size; collective."""
    count = 1
    while True:
        splits = divide(count)
        needed = max_over_ranks(max(map(len, splits)), group)
        if needed == count:
            return splits
        count = needed


def rows_by_prompt(batch: DataProto) -> list[list[int]]:
    """The rows of each `uid` in the order of appearance, and of each prompt's media.

    Without `uid` every row has its own prompt. Conversations with an own prompt may differ in nothing but
    their pictures.
    """
    uids, media = (batch.non_tensor_batch.get(key) for key in ("uid", "multi_modal_data"))
    rows: dict[object, list[int]] = {}
    for row in range(len(batch)):
        key = () if media is None else media_key(media[row])
        rows.setdefault((row if uids is None else uids[row], key), []).append(row)
    return list(rows.values())


def rows_sharing_prompts(batch: DataProto) -> list[list[int]]:
    """The rows of each `uid` whose prompts are equal; a row of several contexts is alone."""
    width = batch.batch["responses"].shape[1]
    prompts = [batch.batch[key][..., :-width] for key in ("input_ids", "attention_mask", "position_ids")]
    return group_equal_prompts(rows_by_prompt(batch), prompts, context_cuts(batch))


def context_cuts(batch: DataProto) -> dict[int, list[int]]:
    """Where further contexts begin among the tokens of a row, for the rows that have some."""
    starts = batch.non_tensor_batch.get("context_starts", ())
    several = [row for row, found in enumerate(starts) if found]
    if not several:
        return {}
    prompts = prompt_lengths(batch)
    return {row: [prompts[row] + start for start in starts[row]] for row in several}


def split_evenly(rows: Sequence[int], count: int) -> list[Sequence[int]]:
    bounds = [len(rows) * part // count for part in range(count + 1)]
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


def max_over_ranks(value: int, group: dist.ProcessGroup | None = None) -> int:
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, device=group_device(group))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor.item())


def _numbers(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    # of each row's group
    numbers = {row: number for number, rows in enumerate(groups) for row in rows}
    return tuple(numbers[row] for row in range(len(numbers)))


def _fill(groups: list[list[int]], size: int) -> list[list[int]]:
    # groups in order; those of more than `size` rows are split evenly
    parts: list[list[int]] = []
    for rows in groups:
        for part in split_evenly(rows, -(-len(rows) // size)):
            if not parts or len(parts[-1]) + len(part) > size:
                parts.append([])
            parts[-1].extend(part)
    return parts


def _bundles(counts: RowCounts, rows: Sequence[int], token_budget: int) -> list[Sequence[int]]:
    # single rows, or the rows of a prompt in as few parts as fit the budget
    def fits(parts: Sequence[Sequence[int]]) -> bool:
        return all(counts.tokens(part) <= token_budget for part in parts)

    bundles: list[Sequence[int]] = []
    for group in counts.group(rows):
        divisions = (split_evenly(group, count) for count in range(1, len(group)))
        bundles += next(filter(fits, divisions), [[row] for row in group])
    return bundles
