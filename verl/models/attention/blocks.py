# SPDX-License-Identifier: Apache-2.0
"""Blocks of tokens that attend to each other in both directions, such as those of an image.

A causal call, with a window or not, covers a block's own and earlier tokens; a further call lets each token
of a block attend to the block's later ones.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from verl.models.attention.kernels import FULL, SLIDING


class Blocks(NamedTuple):
    """Blocks of packed tokens, and the layers that see them whole.

    Example::

        Blocks.of(media_tokens, {"sliding_attention"})  # an image is a run of adjacent media tokens
        Blocks(((3, 7), (12, 16)))  # tokens 3 to 6 and 12 to 15
    """

    bounds: tuple[tuple[int, int], ...]  # first token and the one after the last, in ascending order
    layer_types: frozenset[str] = frozenset({FULL, SLIDING})  # of the layers where blocks have an effect

    @classmethod
    def of(cls, tokens: Tensor, layer_types: Collection[str] = (FULL, SLIDING)) -> "Blocks":
        """Find the runs of adjacent tokens among (n,) packed positions in ascending order, on CPU."""
        breaks = (tokens.diff() != 1).nonzero()[:, 0] + 1
        parts = torch.tensor_split(tokens, breaks.tolist()) if len(tokens) else ()
        bounds = tuple((int(part[0]), int(part[-1]) + 1) for part in parts)
        return cls(bounds, frozenset(layer_types))

    def within(self, segments: Sequence[int]) -> "Blocks":
        """Cut blocks where segments of these lengths end, so that no token sees those of another."""
        ends = torch.tensor(segments).cumsum(0).tolist()
        bounds: list[tuple[int, int]] = []
        remaining = iter(ends)
        end = next(remaining, 0)
        for start, stop in self.bounds:
            while start < stop:
                while end <= start:
                    end = next(remaining)
                bounds.append((start, min(stop, end)))
                start = min(stop, end)
        return self._replace(bounds=tuple(bounds))

    def rows_of_later_tokens(self) -> tuple[tuple[int, list[int]], ...]:
        """Return (first token, row lengths) of queries and of keys: tokens of blocks and the later ones.

        Query t of a block's row is its token t and key t its token t + 1, so that a query attends to keys
        from its own position in the row on. Other tokens are in rows that have only queries or only keys.
        Without blocks of two or more tokens there are no rows.
        """
        bounds = [(start, stop) for start, stop in self.bounds if stop - start > 1]
        if not bounds:
            return ()
        queries, keys, end = [], [], bounds[0][0]
        for start, stop in bounds:
            between = start - end
            if between:
                queries += [between, 0]
                keys += [0, between]
            queries.append(stop - 1 - start)
            keys.append(stop - 1 - start)
            end = stop - 1
        return (bounds[0][0], queries), (bounds[0][0] + 1, keys)
