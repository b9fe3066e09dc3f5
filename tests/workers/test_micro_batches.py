# SPDX-License-Identifier: Apache-2.0
import random

import pytest
import torch

from tests.helpers.distributed import run_distributed
from verl.protocol import DataProto
from verl.workers.micro_batches import dynamic_token_budget, restore_order, split_micro_batches

WIDTH = 64


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


def test_few_micro_batches_are_made_where_the_budget_allows():
    # 8 rows of 16 tokens and 64 tokens for each micro-batch: exactly two.
    assert len(split_micro_batches(batch_of([16] * 8), 1, 64)) == 2


def test_the_budget_is_that_of_the_padded_rows():
    assert dynamic_token_budget(batch_of([3, 4]), 2) == 2 * WIDTH


def test_results_return_to_the_order_of_the_batch():
    parts = [[3, 0], [], [2, 1]]
    results = [torch.tensor([[part] for part in rows]).view(len(rows), 1) for rows in parts]

    assert restore_order(results, parts)[:, 0].tolist() == [0, 1, 2, 3]


def ranks_split(rank, world_size):
    lengths = [[60, 60, 60, 60], [4, 4, 4]][rank]
    return [split_micro_batches(batch_of(lengths), 2, budget) for budget in (None, 64)]


def test_all_ranks_get_the_same_number_and_empty_ones_fill_up():
    first, second = run_distributed(ranks_split, 2)

    assert [len(parts) for parts in first] == [len(parts) for parts in second] == [2, 4]
    assert sorted(row for part in second[1] for row in part) == [0, 1, 2]
    assert [] in second[1]
