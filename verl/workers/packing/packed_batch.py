# SPDX-License-Identifier: Apache-2.0
"""Packing: the rows of a micro batch as one packed sequence without padding, and the inverse.

Rows with the same prompt may share one copy of it, which their responses follow one after another. All of it
is arithmetic on CPU tensors, so that lengths and indices are known without reading a device.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from verl.distributed.token_sharding import SequenceGroup
from verl.utils.masking import check_same_shape

Cuts = Mapping[int, Sequence[int]]  # where further contexts of a row begin, among its tokens
NO_CUTS: Cuts = MappingProxyType({})


class PackedBatch(NamedTuple):
    """One packed sequence of N tokens with all rows of a micro batch, on CPU."""

    input_ids: Tensor  # (N,)
    position_ids: Tensor  # (1 or 4, N): four for M-RoPE
    positions: Tensor  # (B, T): packed position of each token; on padding, of the row's token before it
    groups: tuple[SequenceGroup, ...]  # a row that shares its prompt with no other is one prompt as a whole
    # of each group, whose prompt was taken from the first; empty for a further context of the row before
    rows: tuple[tuple[int, ...], ...]

    def append(self, input_ids: Tensor) -> "PackedBatch":
        """Add a row at the end, its positions counted from zero."""
        length = len(input_ids)
        positions = torch.arange(length).expand(len(self.position_ids), -1)
        return self._replace(
            input_ids=torch.cat([self.input_ids, input_ids]),
            position_ids=torch.cat([self.position_ids, positions], 1),
            groups=(*self.groups, SequenceGroup(length)),
        )


def pack(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the padding of `values` (B, T), where `mask` (B, T) is zero, and join the rows.

    Returns (N,) values, and the packed position of each token (B, T); on padding, of the row's token before.
    """
    check_same_shape(values=values, mask=mask)
    keep = mask.bool()
    positions = (keep.flatten().cumsum(0) - 1).view_as(keep)
    return values[keep], positions


class ResponseTokens(NamedTuple):
    """The M response tokens of padded rows."""

    index: Tensor  # (M,) int64: of each among the elements of (B, R)
    shape: tuple[int, int]  # (B, R)

    @classmethod
    def of(cls, mask: Tensor) -> "ResponseTokens":
        """Find the ones of a mask (B, R) on CPU."""
        rows, columns = mask.shape
        return cls(mask.flatten().nonzero()[:, 0], (rows, columns))

    def take(self, values: Tensor) -> Tensor:
        """(B, R) to (M,)."""
        return values.flatten()[self.index]

    def before(self, positions: Tensor) -> Tensor:
        """Packed position of the token that predicts each: `positions` (B, T) to (M,)."""
        return self.take(positions[:, -self.shape[1] - 1 : -1])

    def unpack(self, values: Tensor) -> Tensor:
        """Put values (M,) on the device of `index` in their rows (B, R), zero elsewhere. Differentiable."""
        return values.new_zeros(math.prod(self.shape)).index_copy(0, self.index, values).view(self.shape)


def pack_rows(
    input_ids: Tensor,
    mask: Tensor,
    position_ids: Tensor,
    members: Sequence[Sequence[int]],
    prompt_width: int,
    cuts: Cuts = NO_CUTS,
) -> PackedBatch:
    """Pack the rows of each group after one copy of their prompt.

    Args:
        input_ids: (B, T).
        mask: (B, T), one on tokens and zero on padding.
        position_ids: (1 or 4, B, T).
        members: The rows of each group, each row once; their prompts and the prompts' positions are equal.
        prompt_width: Columns of the prompt, the first ones; at least one.
        cuts: Its rows share no prompt.
    """
    order = torch.tensor([row for rows in members for row in rows], dtype=torch.int64)  # (B,)
    sizes = torch.tensor([len(rows) for rows in members], dtype=torch.int64)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # (B,): start of each row's group in `order`
    repeats = first != torch.arange(len(order))  # (B,): rows whose prompt is packed already
    keep = mask[order].bool()
    keep[repeats, :prompt_width] = False
    packed_ids, positions = pack(input_ids[order], keep)
    prompt_ends = positions[first, prompt_width - 1, None]  # (B, 1)
    in_prompt = repeats[:, None] & (keep.cumsum(-1) == 0)
    positions = torch.where(in_prompt, positions[first].minimum(prompt_ends), positions)
    groups, rows = _divided(_groups(keep, members, prompt_width), members, cuts)
    return PackedBatch(packed_ids, position_ids[:, order][:, keep], positions[order.argsort()], groups, rows)


def group_equal_prompts(
    candidates: list[list[int]], prompts: Sequence[Tensor], alone: Iterable[int] = ()
) -> list[list[int]]:
    """Keep the rows of each group whose `prompts` (B, ...) equal its first row's; the others run alone."""
    alone = set(alone)
    members = []
    for group in candidates:
        rows = [row for row in group if row not in alone]
        others = {
            row for row in rows[1:] if not all(torch.equal(part[row], part[rows[0]]) for part in prompts)
        }
        alone |= others
        members += [[row for row in rows if row not in others]] if rows else []
    return members + [[row] for row in sorted(alone)]


def _divided(
    groups: Sequence[SequenceGroup], members: Sequence[Sequence[int]], cuts: Cuts
) -> tuple[tuple[SequenceGroup, ...], tuple[tuple[int, ...], ...]]:
    """Divide the groups of rows with several contexts, each of which attends to itself only."""
    divided: list[SequenceGroup] = []
    rows: list[tuple[int, ...]] = []
    for group, own in zip(groups, members, strict=True):
        starts = cuts.get(own[0], ())
        assert not (starts and group.responses), "a row of several contexts shares no prompt"
        pieces = itertools.pairwise([0, *starts, group.prompt])
        divided += [SequenceGroup(stop - start) for start, stop in pieces] if starts else [group]
        rows += [tuple(own), *[()] * len(starts)]
    return tuple(divided), tuple(rows)


def _groups(keep: Tensor, members: Sequence[Sequence[int]], prompt_width: int) -> tuple[SequenceGroup, ...]:
    # keep (B, T): the tokens that each row adds, in packing order
    lengths = torch.stack([keep[:, :prompt_width].sum(-1), keep[:, prompt_width:].sum(-1)], 1).tolist()
    groups, start = [], 0
    for rows in members:
        prompt = lengths[start][0]
        responses = tuple(response for _, response in lengths[start : start + len(rows)])
        groups.append(
            SequenceGroup(prompt, responses) if len(rows) > 1 else SequenceGroup(prompt + responses[0])
        )
        start += len(rows)
    return tuple(groups)
