# SPDX-License-Identifier: Apache-2.0
"""Buckets of weights encoded as their changes: exact whatever the bits, and as small as promised."""

import pytest
import torch

from verl.distributed.weights.changes import BLOCK, apply_changes, find_changes

SIZES = [0, 1, 7, 8, 9, 24, 1000, 2 * BLOCK - 6, 2 * BLOCK, 2 * BLOCK + 8, 6 * BLOCK + 13]  # bytes


def as_bytes(tensor):
    return tensor.flatten().view(torch.uint8)


def random_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def with_changes(old, share, seed=1):
    """Return a copy in which each byte is another with a probability."""
    drawn = torch.rand(old.shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(drawn, old ^ 1, old)


def check_exact(old, new):
    """Return the form in which `old` becomes `new`, after applying it; None if all must be sent."""
    changes, kept = find_changes(old, new), old.clone()
    if changes is None:
        return None
    assert changes.data.nbytes == changes.form.num_bytes < new.nbytes
    apply_changes(kept, changes.form, changes.data)
    assert kept.equal(new)
    return changes.form


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_changed_bytes_of_any_number_and_size_are_restored(size, share):
    old = random_bytes(size)
    check_exact(old, with_changes(old, share))


@pytest.mark.parametrize("size", SIZES)
def test_a_bucket_with_all_bytes_changed_is_sent_whole(size):
    old = random_bytes(size)
    assert find_changes(old, ~old) is None


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 3 * BLOCK - 1])
def test_one_changed_word_takes_its_value_its_place_and_a_count_of_each_block(place):
    old = torch.zeros(3 * BLOCK, dtype=torch.bfloat16)
    new = old.clone()
    new[place] = 1

    form = check_exact(as_bytes(old), as_bytes(new))

    assert form == (1, False, 2 + 2 + 3 * 4)


def test_positions_take_two_bytes_a_word_and_a_mask_a_bit_of_each_whichever_is_less():
    # of 65,536 words: each 32nd, 2,048, by position; each eighth, 8,192, by a mask of 8,192 bytes
    old = torch.zeros(BLOCK, dtype=torch.bfloat16)
    sparse, dense = old.clone(), old.clone()
    sparse[::32], dense[::8] = 1, 1

    assert check_exact(as_bytes(old), as_bytes(sparse)) == (2048, False, 2 * 2048 + 2 * 2048 + 4)
    assert check_exact(as_bytes(old), as_bytes(dense)) == (8192, True, 2 * 8192 + 8192)


def test_words_that_change_together_take_the_smaller_form_too():
    # an eighth of the weights, one after the other: 16,384 of 131,072 words, in few groups of four
    old = torch.zeros(2 * BLOCK, dtype=torch.bfloat16)
    new = old.clone()
    new[: BLOCK // 4] = 1

    assert check_exact(as_bytes(old), as_bytes(new)) == (16384, True, 2 * 16384 + 2 * BLOCK // 8)


SPECIAL = {
    torch.bfloat16: (torch.int16, [0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0x8000, 0x0000, 0x0001, 0x8001]),
    torch.float32: (torch.int32, [0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800000, 0x80000000, 0, 1]),
}


@pytest.mark.parametrize("dtype", SPECIAL)
def test_nan_payloads_infinities_zeros_of_both_signs_and_denormals_keep_their_bits(dtype):
    # each value turns into each other, in either order, among words that stay
    bits, patterns = SPECIAL[dtype]
    limit = 1 << 8 * dtype.itemsize
    signed = [each - limit * (each >= limit // 2) for each in patterns]
    values = torch.tensor(signed, dtype=bits).view(dtype)
    before, after = torch.ones(64 * len(values) ** 2, dtype=dtype), None
    before[::64] = values.repeat_interleave(len(values))
    after = before.clone()
    after[::64] = values.repeat(len(values))

    form = check_exact(as_bytes(before), as_bytes(after))

    assert form is not None and form.num_changed >= len(values) * (len(values) - 1)


def test_a_float32_that_changes_in_its_lower_half_is_one_word():
    old = torch.ones(4 * BLOCK)
    new = old.clone()
    new[::100] += 2**-20

    assert check_exact(as_bytes(old), as_bytes(new)).num_changed == len(new[::100])
