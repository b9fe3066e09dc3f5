# SPDX-License-Identifier: Apache-2.0
"""Encode the bytes of a bucket of weights as its changes since an earlier version.

Words of 16 bits are compared bit by bit, whatever the tensors' dtypes: a weight in bfloat16 is a word, and a
small change of a float32 is often in its lower word. An encoding begins with the new words. Their positions
follow in the smaller of two forms, and then the bytes that do not fill a group of four words, always::

    positions   how many words changed of each 65,536 (uint32), and for each its place among these (uint16)
    mask        a bit for each word

Positions cost 2 bytes a changed word, a mask 1/16 of the bucket: they are equal if one word in 16 changed.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WORD, GROUP = np.dtype(np.uint16), np.dtype(np.uint64)
BLOCK = 1 << 16  # words, whose places are uint16
DENSE = 0.25  # share of changed groups from which a mask is usually smaller


class Form(NamedTuple):
    """Metadata of an encoding, which the receiver needs to read it."""

    num_changed: int  # words
    has_mask: bool
    num_bytes: int


class Changes(NamedTuple):
    """The changes of a bucket."""

    form: Form
    data: Tensor  # (form.num_bytes,) uint8


def find_changes(old: Tensor, new: Tensor) -> Changes | None:
    """Encode what turns `old` into `new`, bytes (N,) in host memory; None unless it is smaller than `new`."""
    before, after = old.numpy(), new.numpy()
    end = _end_of_groups(after)
    words, tail = after[:end].view(WORD), after[end:]
    differs = before[:end].view(GROUP) != after[:end].view(GROUP)  # (N / 8,)
    if np.count_nonzero(differs) < DENSE * differs.size:
        places = _changed_places(before[:end], after[:end], np.flatnonzero(differs))
        ends = np.searchsorted(places, np.arange(_num_blocks(words) + 1) * BLOCK)
        positions = (np.diff(ends).astype(np.uint32), places.astype(WORD))  # modulo 65,536
        if sum(part.nbytes for part in positions) <= _mask_bytes(words):
            return _joined(words[places], positions, tail, has_mask=False)
    mask = before[:end].view(WORD) != words
    if np.count_nonzero(mask) * WORD.itemsize + _mask_bytes(words) + tail.size >= after.size:
        return None
    # numpy reads by positions three times faster than by a mask
    return _joined(words[np.flatnonzero(mask)], (np.packbits(mask),), tail, has_mask=True)


def apply_changes(weights: Tensor, form: Form, data: Tensor) -> None:
    """Turn the bytes (N,) of the old bucket into the encoded ones, in host memory."""
    after, changes = weights.numpy(), data.numpy()
    end = _end_of_groups(after)
    words = after[:end].view(WORD)
    num_value_bytes = form.num_changed * WORD.itemsize
    values, rest = changes[:num_value_bytes].view(WORD), changes[num_value_bytes:]
    if form.has_mask:
        bits = rest[: _mask_bytes(words)]
        words[np.flatnonzero(np.unpackbits(bits, count=words.size).view(bool))] = values
    else:
        num_count_bytes = _num_blocks(words) * np.dtype(np.uint32).itemsize
        counts = rest[:num_count_bytes].view(np.uint32)
        places = rest[num_count_bytes : num_count_bytes + num_value_bytes].view(WORD)
        words[np.repeat(np.arange(counts.size) * BLOCK, counts) + places] = values
    after[end:] = changes[changes.size - (after.size - end) :]


def _changed_places(old: np.ndarray, new: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the positions of changed words in bytes, given those of the groups (G,) with changes."""
    size = GROUP.itemsize // WORD.itemsize
    differs = old.view(GROUP)[groups].view(WORD) != new.view(GROUP)[groups].view(WORD)  # (G x 4,)
    inside = np.flatnonzero(differs)
    return groups[inside // size] * size + inside % size


def _joined(
    values: np.ndarray, positions: tuple[np.ndarray, ...], tail: np.ndarray, *, has_mask: bool
) -> Changes:
    data = np.concatenate([part.view(np.uint8) for part in (values, *positions, tail)])
    return Changes(Form(values.size, has_mask, data.size), torch.from_numpy(data))


def _end_of_groups(data: np.ndarray) -> int:
    return data.size // GROUP.itemsize * GROUP.itemsize


def _num_blocks(words: np.ndarray) -> int:
    return -(-words.size // BLOCK)


def _mask_bytes(words: np.ndarray) -> int:
    return -(-words.size // 8)
