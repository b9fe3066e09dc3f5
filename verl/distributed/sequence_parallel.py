# SPDX-License-Identifier: Apache-2.0
"""Which ranks share a line of tokens, and how.

sp = ulysses x ring. The ranks of one line are neighbours; inside them ulysses is the fast axis, because its
all-to-all moves the most data::

    rank            0  1  2  3  4  5  6  7      ulysses_size 2, ring_size 2
    dp_index        0  0  0  0  1  1  1  1
    ring_index      0  0  1  1  0  0  1  1
    ulysses_index   0  1  0  1  0  1  0  1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class SequenceParallel:
    """This rank's place among the ranks that hold parts of one line of tokens.

    A group of an axis of size 1 is None, and nothing is communicated along it.
    """

    ulysses_size: int = 1
    ring_size: int = 1
    index: int = 0  # among the ranks of the line
    dp_size: int = 1
    dp_index: int = 0
    group: dist.ProcessGroup | None = None  # the ranks of the line, by index
    ulysses_group: dist.ProcessGroup | None = None  # by ulysses_index
    ring_group: dist.ProcessGroup | None = None  # by ring_index
    dp_group: dist.ProcessGroup | None = None  # ranks with the same index, by dp_index
    gather_pieces: int = 1  # exchanges in which features of media are gathered

    @classmethod
    def none(cls) -> "SequenceParallel":
        """Every rank holds whole lines."""
        return cls()

    @classmethod
    def build(
        cls, ranks: Sequence[int], ulysses_size: int, ring_size: int, gather_pieces: int = 1
    ) -> "SequenceParallel":
        """Divide ranks into lines; collective over the whole world, whichever ranks are given.

        Args:
            ranks: Global ranks in order; this process is one of them.
            ulysses_size: Ranks that share the attention heads of a piece of a line.
            ring_size: Pieces of a line.
            gather_pieces: Exchanges in which features of media are gathered, see `gather_rows`.

        Raises:
            ValueError: The ranks do not divide into lines.
        """
        size = ulysses_size * ring_size
        if min(ulysses_size, ring_size) < 1 or len(ranks) % size:
            raise ValueError(
                f"{len(ranks)} ranks cannot be divided by `ulysses_size` ({ulysses_size}) x `ring_size`"
                f" ({ring_size}): set them so that their product divides the number of devices"
            )
        lines = [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
        inside = range(size)
        by_ulysses = [[i for i in inside if i // ulysses_size == ring] for ring in range(ring_size)]
        by_ring = [[i for i in inside if i % ulysses_size == ulysses] for ulysses in range(ulysses_size)]
        dp_index, index = divmod(list(ranks).index(dist.get_rank()), size)
        return cls(
            ulysses_size,
            ring_size,
            index,
            len(lines),
            dp_index,
            _own_group(lines),
            _own_group([[line[i] for i in part] for line in lines for part in by_ulysses]),
            _own_group([[line[i] for i in part] for line in lines for part in by_ring]),
            _own_group([[line[i] for line in lines] for i in inside]),
            gather_pieces,
        )

    @property
    def size(self) -> int:
        """Ranks that share a line."""
        return self.ulysses_size * self.ring_size

    @property
    def ulysses_index(self) -> int:
        """Which piece of its ring rank's tokens this rank holds."""
        return self.index % self.ulysses_size

    @property
    def ring_index(self) -> int:
        """Which pair of chunks of every sequence this rank holds a piece of."""
        return self.index // self.ulysses_size


def data_parallel_group(sp: SequenceParallel) -> dist.ProcessGroup:
    """The ranks that have other sequences than this one, itself included; collective over the world."""
    everyone = dist.group.WORLD
    assert everyone is not None, "the process group is set up"
    if sp.size == 1:
        return everyone
    if sp.dp_group is not None:
        return sp.dp_group
    alone: list[Any] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()]


def _own_group(parts: list[list[int]]) -> dist.ProcessGroup | None:
    """Make a group for each part, on every rank in the same order; this rank's, or None if it is alone."""
    own = None
    for part in parts:
        if len(part) > 1:
            group = dist.new_group(part)
            if dist.get_rank() in part:
                assert isinstance(group, dist.ProcessGroup), "new_group gives its members a group"
                own = group
    return own
