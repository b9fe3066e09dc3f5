# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.distributed.token_sharding import SequenceGroup
from verl.workers.packing.packed_batch import ResponseTokens, pack, pack_rows

# Rows 0 and 2 have the prompt 5 6; row 1 has 7. Two columns of prompt, three of responses.
IDS = torch.tensor([[5, 6, 10, 11, 0], [0, 7, 20, 0, 0], [5, 6, 30, 31, 32]])
MASK = (IDS > 0).long()
POSITIONS = torch.tensor([[0, 1, 2, 3, 0], [0, 0, 1, 0, 0], [0, 1, 2, 3, 4]])[None]

PADDED = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]])
VALUES = torch.arange(16).view(4, 4)


def test_packed_rows_follow_each_other():
    packed = pack_rows(IDS, MASK, POSITIONS, [[0], [1], [2]], prompt_width=1)

    assert packed.input_ids.tolist() == [5, 6, 10, 11, 7, 20, 5, 6, 30, 31, 32]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4]]
    assert packed.groups == (SequenceGroup(4), SequenceGroup(2), SequenceGroup(5))
    assert packed.positions[:, -1].tolist() == [3, 5, 10]


def test_responses_follow_one_copy_of_their_prompt():
    packed = pack_rows(IDS, MASK, POSITIONS, [[0, 2], [1]], prompt_width=2)

    # 5 6 | 10 11 | 30 31 32, then row 1 on its own.
    assert packed.input_ids.tolist() == [5, 6, 10, 11, 30, 31, 32, 7, 20]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1]]
    assert packed.groups == (SequenceGroup(2, (2, 3)), SequenceGroup(2))
    assert packed.rows == ((0, 2), (1,))


def test_the_token_before_a_response_is_the_end_of_the_shared_prompt():
    packed = pack_rows(IDS, MASK, POSITIONS, [[0, 2], [1]], prompt_width=2)
    before = packed.positions[:, 1:-1]

    assert before[0, :2].tolist() == [1, 2]
    assert before[1, :1].tolist() == [7]
    assert before[2].tolist() == [1, 4, 5]
    assert packed.positions[:, -1].tolist() == [3, 8, 6]


def test_a_row_without_response_ends_with_its_prompt():
    mask = MASK.clone()
    mask[2, 2:] = 0

    packed = pack_rows(IDS, mask, POSITIONS, [[0, 2], [1]], prompt_width=2)

    assert packed.groups == (SequenceGroup(2, (2, 0)), SequenceGroup(2))
    assert packed.positions[:, -1].tolist() == [3, 5, 1]


def test_an_appended_row_comes_last_and_shares_nothing():
    packed = pack_rows(IDS, MASK, POSITIONS, [[0, 2], [1]], prompt_width=2).append(torch.tensor([8, 9]))

    assert packed.input_ids[-2:].tolist() == [8, 9]
    assert packed.position_ids[:, -2:].tolist() == [[0, 1]]
    assert packed.groups[-1] == SequenceGroup(2)


def test_pack_joins_rows_without_padding():
    values, positions = pack(VALUES, PADDED)

    assert values.tolist() == [1, 2, 4, 5, 6, 7, 15]
    assert positions[PADDED.bool()].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_unpack_is_the_inverse_and_leaves_zeros_on_padding():
    values, _ = pack(VALUES, PADDED)

    assert torch.equal(ResponseTokens.of(PADDED).unpack(values), VALUES * PADDED)


def test_unpack_passes_gradients_to_the_values():
    values = torch.ones(7, requires_grad=True)

    (ResponseTokens.of(PADDED).unpack(values) * VALUES).sum().backward()

    assert values.grad.tolist() == [1, 2, 4, 5, 6, 7, 15]


def test_pack_refuses_a_mask_of_another_shape():
    with pytest.raises(ValueError, match="one shape"):
        pack(VALUES, PADDED[:, :3])
