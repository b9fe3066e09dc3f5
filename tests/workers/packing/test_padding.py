# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.workers.packing.padding import pack, unpack

MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]])
VALUES = torch.arange(16).view(4, 4)


def test_pack_joins_rows_without_padding():
    packed = pack(VALUES, MASK)

    assert packed.values.tolist() == [1, 2, 4, 5, 6, 7, 15]
    assert packed.cu_seqlens.tolist() == [0, 2, 6, 6, 7]
    assert packed.positions[MASK.bool()].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_unpack_is_the_inverse_and_leaves_zeros_on_padding():
    assert torch.equal(unpack(pack(VALUES, MASK).values, MASK), VALUES * MASK)


def test_unpack_hands_gradients_back():
    values = torch.ones(7, requires_grad=True)

    (unpack(values, MASK) * VALUES).sum().backward()

    assert values.grad.tolist() == [1, 2, 4, 5, 6, 7, 15]


def test_pack_refuses_a_mask_of_another_shape():
    with pytest.raises(ValueError, match="one shape"):
        pack(VALUES, MASK[:, :3])
