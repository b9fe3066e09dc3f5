# SPDX-License-Identifier: Apache-2.0
"""One vision-tower call for all images and videos of a micro batch, and the tokens that they replace.

Under FSDP every rank must run the tower equally often, so images and videos are encoded together, and ranks
without media encode a small blank image. Ranks with the same rows each encode some of the frames or tiles
(`MediaShare`); a tower's attention stays within one, so the features are the same.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.distributed.length_balancing import split_evenly
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.ulysses import gather_rows
from verl.models.attention.layouts import Blocks
from verl.models.families.interface import Family, Kind, MediaFamily, Medium

Features = dict[Kind, list[Tensor]]  # (tokens, hidden size x (1 + deepstack levels)) of each medium


@dataclass(frozen=True, eq=False)
class MediaShare:
    """The division of all media's units, in order, over the ranks that share a packed sequence."""

    features: tuple[int, ...]  # of each medium
    counts: tuple[int, ...]  # features that each rank encodes
    sp: SequenceParallel

    def gather(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Gather the features of all media from those of this rank; gradients are summed over the ranks."""
        own = torch.cat(list(features))[: self.counts[self.sp.index]]  # without a blank image
        gathered = gather_rows(own, self.counts, self.sp, sum_gradients=True, chunks=self.sp.gather_chunks)
        return list(gathered.split(self.features))


def share_media(
    family: MediaFamily, config: Any, media: Sequence[Medium], sp: SequenceParallel, blank: Sequence[Medium]
) -> tuple[list[Medium], MediaShare]:
    """Select this rank's frames or tiles of the media of a packed sequence: the largest share is minimal.

    A rank without any gets `blank`, because every rank runs the tower.
    """
    units = [family.units(config, medium.facts) for medium in media]  # features of each
    flat = [*itertools.chain.from_iterable(units)]
    bounds = split_evenly(flat, sp.size)
    counts = tuple(sum(flat[start:stop]) for start, stop in itertools.pairwise(bounds))
    share = MediaShare(tuple(map(sum, units)), counts, sp)
    first, last = bounds[sp.index : sp.index + 2]
    own, start = [], 0
    for medium, sizes in zip(media, units, strict=True):
        stop = start + len(sizes)
        if max(start, first) < min(stop, last):
            own.append(family.cut(config, medium, max(start, first) - start, min(stop, last) - start))
        start = stop
    return own or list(blank), share


def blocks_of(family: Family, config: Any, input_ids: Tensor) -> Blocks | None:
    """Return the images and frames in packed tokens (N,) whose tokens attend to each other, if any do."""
    layers = family.block_layers(config)
    if not layers or not isinstance(family, MediaFamily):
        return None
    tokens = torch.cat(list(family.media_tokens(config, input_ids).values()))
    return Blocks.of(tokens.sort().values, layers)


def order_of(family: MediaFamily, media: Sequence[Medium]) -> dict[Kind, list[int]]:
    """Return the numbers of the media whose features replace tokens of each kind."""
    order: dict[Kind, list[int]] = {}
    for number, medium in enumerate(media):
        order.setdefault(family.token_kind(medium.kind), []).append(number)
    return order
