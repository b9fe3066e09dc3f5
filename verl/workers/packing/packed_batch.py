# SPDX-License-Identifier: Apache-2.0
"""The rows of a micro-batch as one line of tokens, with what finds them again.

Rows stand one behind the other without padding. Rows of one prompt may share it: the prompt stands once,
and their responses follow it one behind the other.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from verl.distributed.token_sharding import SequenceGroup
from verl.workers.packing.padding import pack


class PackedBatch(NamedTuple):
    """One line of tokens of all rows."""

    input_ids: Tensor  # (N,)
    position_ids: Tensor  # (rows, N): one row, or four for M-RoPE
    places: Tensor  # (B, T): where each token of the batch stands; for padding, the row's token before it
    groups: tuple[SequenceGroup, ...]  # a row that shares its prompt with none is a prompt as a whole
    shown: tuple[int, ...]  # the rows whose prompts stand in the line, in its order

    @property
    def is_shared(self) -> bool:
        """Whether any rows share a prompt."""
        return any(group.responses for group in self.groups)

    @property
    def cu_seqlens(self) -> Tensor:
        """(groups + 1,) int32: where each group begins, and the end."""
        sizes = [group.prompt + sum(group.responses) for group in self.groups]
        bounds = list(itertools.accumulate(sizes, initial=0))
        return torch.tensor(bounds, dtype=torch.int32, device=self.input_ids.device)

    def joined(self, input_ids: Tensor) -> "PackedBatch":
        """With one more row of tokens at the end, counted from zero."""
        length = len(input_ids)
        positions = torch.arange(length, device=input_ids.device).expand(len(self.position_ids), -1)
        return self._replace(
            input_ids=torch.cat([self.input_ids, input_ids]),
            position_ids=torch.cat([self.position_ids, positions], 1),
            groups=(*self.groups, SequenceGroup(length)),
        )


def separate_rows(input_ids: Tensor, mask: Tensor, position_ids: Tensor) -> PackedBatch:
    """Each row with its own prompt.

    Args:
        input_ids: (B, T).
        mask: (B, T), one on tokens and zero on padding.
        position_ids: (rows, B, T).
    """
    packed = pack(input_ids, mask)
    groups = tuple(SequenceGroup(length) for length in packed.cu_seqlens.diff().tolist())
    rows = tuple(range(len(groups)))
    return PackedBatch(packed.values, position_ids[:, mask.bool()], packed.positions, groups, rows)


def shared_prompts(
    input_ids: Tensor, mask: Tensor, position_ids: Tensor, members: Sequence[Sequence[int]], prompt_width: int
) -> PackedBatch:
    """The rows of each group behind one copy of their prompt.

    Args:
        input_ids: (B, T).
        mask: (B, T), one on tokens and zero on padding.
        position_ids: (rows, B, T).
        members: The rows of each group, each row once; their prompts and the positions of these are equal.
        prompt_width: Columns of the prompt, the first ones; at least one.
    """
    device = mask.device
    order = torch.tensor([row for rows in members for row in rows], device=device)  # (B,)
    sizes = torch.tensor([len(rows) for rows in members], device=device)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(
        sizes
    )  # (B,): where the row's group begins in `order`
    follows = first != torch.arange(len(order), device=device)  # (B,): rows that add no prompt
    keep = mask[order].bool()
    keep[follows, :prompt_width] = False
    packed = pack(input_ids[order], keep)
    places = packed.positions
    prompt_ends = places[first, prompt_width - 1, None]  # (B, 1)
    before_own = follows[:, None] & (keep.cumsum(-1) == 0)
    places = torch.where(before_own, places[first].minimum(prompt_ends), places)
    return PackedBatch(
        packed.values,
        position_ids[:, order][:, keep],
        places[order.argsort()],
        _groups(keep, members, prompt_width),
        tuple(rows[0] for rows in members),
    )


def _groups(keep: Tensor, members: Sequence[Sequence[int]], prompt_width: int) -> tuple[SequenceGroup, ...]:
    """The lengths in each group, from what each row adds to the line (B, T), in the line's order."""
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
