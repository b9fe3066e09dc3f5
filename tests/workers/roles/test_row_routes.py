# SPDX-License-Identifier: Apache-2.0
"""Routes of rows, packed with their tokens and back."""

import pytest
import torch

from verl.batch_keys import BatchError
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import SPRows
from verl.workers.packing.observers import PackedRows, PassTokens
from verl.workers.roles.routers import column_of, pack_routes

LIKE = torch.empty(0, 1, 2, dtype=torch.uint8)
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])

APART = PackedRows(MASK, torch.tensor([[0, 0, 1, 2], [3, 4, 5, 5]]), 6, None)


def rows_of(*first):
    # (3, 1, 2) each: the tokens of a row are numbered from `first`
    return [
        torch.arange(start, start + 3, dtype=torch.uint8)[:, None, None].expand(3, 1, 2) for start in first
    ]


def test_rows_follow_one_another_and_a_shared_prompt_has_the_routes_of_its_first_row():
    apart = torch.tensor([[0, 0, 1, 2], [3, 4, 5, 5]])
    shared = torch.tensor([[0, 0, 1, 2], [0, 1, 3, 3]])  # two tokens of prompt

    packed = pack_routes(rows_of(10, 20), PackedRows(MASK, apart, 7, None), LIKE)
    together = pack_routes(rows_of(10, 20), PackedRows(MASK, shared, 4, None), LIKE)

    assert packed[:, 0, 0].tolist() == [10, 11, 12, 20, 21, 22, 255]
    assert together[:, 0, 1].tolist() == [10, 11, 12, 22]


def test_rows_without_routes_are_not_routed():
    packed = pack_routes([None, rows_of(20)[0]], APART, LIKE)

    assert packed[:, 0, 0].tolist() == [255, 255, 255, 20, 21, 22]


def test_routes_of_other_tokens_are_refused():
    with pytest.raises(BatchError, match="row 0 of 3 tokens has routes"):
        pack_routes(
            [rows_of(1)[0][:2], None],
            APART,
            LIKE,
        )


def test_packed_routes_become_a_column_of_rows_again():
    values = torch.cat(rows_of(10, 20))

    tokens = SPRows.of(torch.arange(6), None, SequenceParallel())
    rows = torch.tensor([0, 0, 0, 1, 1, 1])
    padded = PassTokens(MASK, 2, tokens, rows, torch.ones(6)).padded(values, 255)

    column = column_of(padded, MASK)

    assert padded[:, :, 0, 0].tolist() == [[255, 10, 11, 12], [20, 21, 22, 255]]

    assert [row[:, 0].tolist() for row in column] == [
        [[10, 10], [11, 11], [12, 12]],
        [[20, 20], [21, 21], [22, 22]],
    ]
