# SPDX-License-Identifier: Apache-2.0
import torch

from verl.distributed.token_sharding import SequenceGroup
from verl.workers.packing.packed_batch import separate_rows, shared_prompts

# Rows 0 and 2 have the prompt 5 6; row 1 has 7. Two columns of prompt, three of responses.
IDS = torch.tensor([[5, 6, 10, 11, 0], [0, 7, 20, 0, 0], [5, 6, 30, 31, 32]])
MASK = (IDS > 0).long()
POSITIONS = torch.tensor([[0, 1, 2, 3, 0], [0, 0, 1, 0, 0], [0, 1, 2, 3, 4]])[None]


def test_separate_rows_stand_one_behind_the_other():
    line = separate_rows(IDS, MASK, POSITIONS)

    assert line.input_ids.tolist() == [5, 6, 10, 11, 7, 20, 5, 6, 30, 31, 32]
    assert line.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4]]
    assert line.groups == (SequenceGroup(4), SequenceGroup(2), SequenceGroup(5))
    assert not line.is_shared
    assert line.cu_seqlens.tolist() == [0, 4, 6, 11]
    assert line.places[:, -1].tolist() == [3, 5, 10]


def test_responses_stand_behind_one_copy_of_their_prompt():
    line = shared_prompts(IDS, MASK, POSITIONS, [[0, 2], [1]], prompt_width=2)

    # 5 6 | 10 11 | 30 31 32, then row 1 on its own.
    assert line.input_ids.tolist() == [5, 6, 10, 11, 30, 31, 32, 7, 20]
    assert line.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1]]
    assert line.groups == (SequenceGroup(2, (2, 3)), SequenceGroup(2))
    assert line.is_shared
    assert line.shown == (0, 1)


def test_the_token_before_a_response_is_the_end_of_the_shared_prompt():
    line = shared_prompts(IDS, MASK, POSITIONS, [[0, 2], [1]], prompt_width=2)
    before = line.places[:, 1:-1]

    assert before[0, :2].tolist() == [1, 2]
    assert before[1, :1].tolist() == [7]
    assert before[2].tolist() == [1, 4, 5]
    assert line.places[:, -1].tolist() == [3, 8, 6]


def test_a_row_without_response_ends_with_its_prompt():
    mask = MASK.clone()
    mask[2, 2:] = 0

    line = shared_prompts(IDS, mask, POSITIONS, [[0, 2], [1]], prompt_width=2)

    assert line.groups == (SequenceGroup(2, (2, 0)), SequenceGroup(2))
    assert line.places[:, -1].tolist() == [3, 5, 1]


def test_a_joined_row_stands_at_the_end_and_shares_nothing():
    line = shared_prompts(IDS, MASK, POSITIONS, [[0, 2], [1]], prompt_width=2).joined(torch.tensor([8, 9]))

    assert line.input_ids[-2:].tolist() == [8, 9]
    assert line.position_ids[:, -2:].tolist() == [[0, 1]]
    assert line.groups[-1] == SequenceGroup(2)
