# SPDX-License-Identifier: Apache-2.0
import random

import pytest
import torch

from tests.helpers.distributed import run_distributed
from verl.protocol import DataProto
from verl.utils.plain_data import objects
from verl.workers.packing.micro_batches import (
    MicroBatchLimit,
    RowCounts,
    agreed_splits,
    rows_sharing_prompts,
    split_rows,
)

WIDTH = 64


def split_micro_batches(batch, size, token_budget=None, share_prompt=False):
    """A batch in micro batches, as many on every rank."""
    counts = RowCounts.of(batch, share_prompt)
    limit = MicroBatchLimit(rows=size) if token_budget is None else MicroBatchLimit(tokens=token_budget)
    (split,) = agreed_splits(lambda least: [split_rows(counts, range(len(batch)), limit, least)])
    return split


def batch_of(lengths):
    columns = torch.arange(WIDTH)
    return DataProto.from_dict({"attention_mask": (columns < torch.tensor(lengths)[:, None]).long()})


def test_a_fixed_size_takes_rows_in_order():
    assert split_micro_batches(batch_of([3] * 5), 2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("seed", range(30))
def test_every_row_comes_once_and_only_a_single_row_exceeds_the_budget(seed):
    generator = random.Random(seed)
    lengths = [generator.randint(1, WIDTH) for _ in range(generator.randint(1, 40))]
    budget = generator.randint(8, 4 * WIDTH)

    parts = split_micro_batches(batch_of(lengths), 1, budget)

    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) <= 1 or sum(lengths[row] for row in part) <= budget for part in parts)


def test_there_are_as_few_micro_batches_as_the_budget_allows():
    # 8 rows of 16 tokens and 64 tokens for each micro batch: exactly two.
    assert len(split_micro_batches(batch_of([16] * 8), 1, 64)) == 2


def groups_of(prompts, responses, order=None):
    """Groups with one uid each: prompt lengths, and the response lengths in each."""
    rows = [
        (prompt, length, f"u{number}")
        for number, (prompt, lengths) in enumerate(zip(prompts, responses, strict=True))
        for length in lengths
    ]
    rows = rows if order is None else [rows[index] for index in order]
    columns = torch.arange(WIDTH)
    prompt, response = (torch.tensor([row[part] for row in rows])[:, None] for part in (0, 1))
    mask = torch.cat([columns >= WIDTH - prompt, columns < response], 1).long()
    return DataProto.from_dict(
        {
            "attention_mask": mask,
            "input_ids": mask,
            "position_ids": mask,
            "responses": (columns < response).long(),
        },
        {"uid": objects([row[2] for row in rows])},
    )


def true_tokens(batch, rows):
    """Tokens of a micro batch whose rows share the prompts of equal uids, counted row by row."""
    seen, total = set(), 0
    for row in rows:
        mask = batch.batch["attention_mask"][row]
        total += int(mask[WIDTH:].sum())
        if batch.non_tensor_batch["uid"][row] not in seen:
            seen.add(batch.non_tensor_batch["uid"][row])
            total += int(mask[:WIDTH].sum())
    return total


def test_a_shared_prompt_counts_once():
    # Two groups of 40 + 4 x 5 = 60 tokens: one micro batch each; single rows need 360 / 64, so 6.
    batch = groups_of([40, 40], [[5] * 4, [5] * 4])

    assert sorted(split_micro_batches(batch, 1, 64, share_prompt=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(split_micro_batches(batch, 1, 64)) >= 6


def test_a_group_beyond_the_budget_is_split_into_as_few_parts_as_fit():
    # 40 + 6 x 10 = 100 tokens do not fit 80; two parts of 40 + 30 do.
    parts = split_micro_batches(groups_of([40], [[10] * 6]), 1, 80, share_prompt=True)

    assert sorted(parts) == [[0, 1, 2], [3, 4, 5]]


def test_a_prompt_beyond_the_budget_runs_once_for_each_response():
    parts = split_micro_batches(groups_of([60], [[10] * 3]), 1, 50, share_prompt=True)

    assert sorted(part for part in parts if part) == [[0], [1], [2]]


@pytest.mark.parametrize("seed", range(30))
def test_every_row_comes_once_and_parts_of_groups_fit_the_budget(seed):
    generator = random.Random(seed)
    prompts = [generator.randint(1, WIDTH) for _ in range(generator.randint(1, 8))]
    responses = [[generator.randint(0, WIDTH) for _ in range(generator.randint(1, 6))] for _ in prompts]
    order = list(range(sum(map(len, responses))))
    generator.shuffle(order)
    batch = groups_of(prompts, responses, order)
    budget = generator.randint(8, 6 * WIDTH)

    parts = split_micro_batches(batch, 1, budget, share_prompt=True)

    assert sorted(row for part in parts for row in part) == list(range(len(batch)))
    assert all(len(part) <= 1 or true_tokens(batch, part) <= budget for part in parts)


def test_a_fixed_size_keeps_small_groups_whole_and_splits_larger_ones_evenly():
    # Rows 0, 2 and 4 are one prompt's; five rows of another go into 3 + 2.
    batch = groups_of([9, 9], [[1] * 3, [1] * 5], order=[0, 3, 1, 4, 2, 5, 6, 7])

    assert split_micro_batches(batch, 3, share_prompt=True) == [[0, 2, 4], [1, 3], [5, 6, 7]]


def ranks_split(rank, world_size):
    lengths = [[60, 60, 60, 60], [4, 4, 4]][rank]
    return [split_micro_batches(batch_of(lengths), 2, budget) for budget in (None, 64)]


def test_all_ranks_get_the_same_number_of_micro_batches():
    first, second = run_distributed(ranks_split, 2)

    assert [len(parts) for parts in first] == [len(parts) for parts in second] == [2, 4]
    assert sorted(row for part in second[1] for row in part) == [0, 1, 2]
    assert [] in second[1]


@pytest.mark.parametrize("token_budget", [None, 8])
def test_rows_of_unknown_prompts_are_split_one_by_one(token_budget):
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]])
    batch = DataProto.from_dict({"attention_mask": mask}, {"uid": objects(["a", "a", "b", "b"])})

    shared = split_micro_batches(batch, 2, token_budget, share_prompt=True)

    assert shared == split_micro_batches(batch, 2, token_budget, share_prompt=False)


def test_rows_with_other_media_or_several_contexts_share_no_prompt():
    batch = groups_of([40], [[5] * 5])
    media = [{"images": ["a"]}, {"images": ["b"]}, {"images": ["a"]}, {"images": ["a"]}, {"images": ["b"]}]
    batch = batch.merge(
        {"multi_modal_data": objects(media), "context_starts": objects([(), (), (), (3,), ()])}
    )

    assert rows_sharing_prompts(batch) == [[0, 2], [1, 4], [3]]
    # 40 + 2 x 5 for each pair, 45 for the row that is alone
    parts = split_micro_batches(batch, 1, 64, share_prompt=True)
    assert sorted(map(sorted, parts)) == [[0, 2], [1, 4], [3]]
