# SPDX-License-Identifier: Apache-2.0
"""Process groups of sequence parallelism.

sp = ulysses x ring. The ranks that share a packed sequence are neighbors; among them ulysses is the inner
axis, because its all-to-all moves the most data::

    rank            0  1  2  3  4  5  6  7      ulysses_size 2, ring_size 2
    dp_index        0  0  0  0  1  1  1  1
    ring_index      0  0  1  1  0  0  1  1
    ulysses_index   0  1  0  1  0  1  0  1

Under tensor parallelism each rank here is `tp_size` neighbors with the same tokens; groups have one of each.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceParallel:
    """This rank's coordinates and process groups; but for `dp_group`, that of an axis of size 1 is None."""

    ulysses_size: int = 1
    ring_size: int = 1
    index: int = 0  # among the ranks that share a packed sequence
    dp_size: int = 1
    dp_index: int = 0
    group: dist.ProcessGroup | None = None  # ranks that share a packed sequence, by index
    ulysses_group: dist.ProcessGroup | None = None  # by ulysses_index
    ring_group: dist.ProcessGroup | None = None  # by ring_index
    dp_group: dist.ProcessGroup | None = None  # ranks with the same index, by dp_index
    gather_chunks: int = 1  # chunks in which media features are gathered
    is_first: bool = True  # of the ranks with the same rows

    @classmethod
    def build(cls, ulysses_size: int, ring_size: int, gather_chunks: int = 1, tp_size: int = 1) -> Self:
        """Create the process groups; collective over all ranks."""
        size, world_size = ulysses_size * ring_size * tp_size, dist.get_world_size()
        if size < 1 or world_size % size:
            raise ValueError(
                f"{world_size} ranks cannot be divided by `ulysses_size` ({ulysses_size}) x `ring_size`"
                f" ({ring_size}) x `tensor_parallel_size` ({tp_size}): their product must divide the devices"
            )
        every = torch.arange(world_size).view(-1, size)  # (dp, ring x ulysses x tp)
        ranks = every.view(-1, ring_size, ulysses_size, tp_size).movedim(3, 1).flatten(0, 1)
        dp_index, place = divmod(dist.get_rank(), size)
        return cls(
            ulysses_size,
            ring_size,
            place // tp_size,
            len(every),
            dp_index,
            _new_group(ranks.flatten(1)),  # of (dp x tp, ring, ulysses)
            _new_group(ranks.flatten(0, 1)),
            _new_group(ranks.transpose(1, 2).flatten(0, 1)),
            dist.group.WORLD if size == 1 else _new_group(every.T, even_alone=True),
            gather_chunks,
            place == 0,
        )

    @property
    def size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def ulysses_index(self) -> int:
        return self.index % self.ulysses_size

    @property
    def ring_index(self) -> int:
        return self.index // self.ulysses_size


def _new_group(rows: Tensor, *, even_alone: bool = False) -> dist.ProcessGroup | None:
    """Create a group for each row of ranks, in the same order on every rank; return this rank's."""
    own = None  # for a rank that is alone in its row, unless `even_alone`
    for ranks in rows.tolist():
        if len(ranks) > 1 or even_alone:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup), "new_group gives its members a group"
                own = group
    return own
