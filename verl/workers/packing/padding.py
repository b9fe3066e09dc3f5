# SPDX-License-Identifier: Apache-2.0
"""Pack padded rows into one line of tokens, and the inverse.

Packed tokens stand row after row without padding; `cu_seqlens` holds where each row starts, and the total
at its end.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from verl.utils.masking import check_same_shape


class Packed(NamedTuple):
    """The kept tokens of a padded batch, row after row."""

    values: Tensor  # (N, ...)
    cu_seqlens: Tensor  # (B + 1,) int32
    positions: Tensor  # (B, T) int64: where each kept token went; meaningless on padding


def pack(values: Tensor, mask: Tensor) -> Packed:
    """Drop the padding of a batch and join its rows.

    Args:
        values: (B, T).
        mask: (B, T), one on tokens and zero on padding, wherever it lies in the row.

    Returns:
        The packed values, the row boundaries, and the packed position of each token.
    """
    check_same_shape(values=values, mask=mask)
    keep = mask.bool()
    cu_seqlens = torch.zeros(len(mask) + 1, dtype=torch.int32, device=mask.device)
    cu_seqlens[1:] = keep.sum(-1).cumsum(0)
    positions = (keep.flatten().cumsum(0) - 1).view_as(keep)
    return Packed(values[keep], cu_seqlens, positions)


def unpack(values: Tensor, mask: Tensor) -> Tensor:
    """Put packed values back where `mask` is one; zero elsewhere. Differentiable.

    Args:
        values: (N,), as many as the mask has ones.
        mask: (B, T).

    Returns:
        (B, T).
    """
    keep = mask.bool()
    return values.new_zeros(keep.shape).masked_scatter(keep, values)
