# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of MiniCPM-V 4.7: an image and its slices lie on one canvas of height and width.

A crop is a run of media tokens: the whole picture in small, or a slice of it. The whole is stretched over the
canvas, each slice has its own part, and the markers around crops lie at their corners. Text continues after
the longer side of the canvas.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Size = tuple[int, int]  # height and width in tokens


class Markers(NamedTuple):
    """Tokens around crops."""

    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    newline: int


class Crop(NamedTuple):
    """Media tokens `start` to `stop` of a crop."""

    start: int
    stop: int
    size: Size


@dataclass
class Picture:
    """An image or a frame of a video: tokens `start` to `stop` with its markers."""

    whole: Crop
    slices: list[Crop] = field(default_factory=list)
    stop: int = 0

    @property
    def start(self) -> int:
        return self.whole.start - 1

    @property
    def columns(self) -> int:
        """The number of slices in a row, which a line break ends."""
        for number, (one, other) in enumerate(itertools.pairwise(self.slices), 1):
            if other.start - one.stop > 2:  # more than the end of one and the start of the other
                return number
        return max(1, len(self.slices))

    @property
    def canvas(self) -> Size:
        if not self.slices:
            return self.whole.size
        height, width = self.slices[0].size
        return len(self.slices) // self.columns * height, self.columns * width


def canvas_positions(input_ids: Tensor, is_media: Tensor, sizes: Sequence[Size], markers: Markers) -> Tensor:
    """Return positions (4, L) of a prompt (L,): text, time, height and width.

    Args:
        input_ids: One prompt with expanded media tokens, without padding.
        is_media: (L,) kinds of media tokens: 0 is text, other numbers are kinds.
        sizes: Height and width of each crop in tokens, in the order of the prompt.
    """
    tokens = input_ids.tolist()
    positions = torch.zeros(3, len(tokens), dtype=torch.int64)
    done, position, previous = 0, 0, None
    for picture in _pictures(tokens, is_media.tolist(), sizes, markers):
        gap = picture.start - done
        if gap > 0:
            positions[:, done : picture.start] = torch.arange(gap) + position
            # Between pictures that only markers separate, a step more keeps the marker off the last token.
            position += gap + (previous is not None and _only_markers(tokens, previous, picture, markers))
        _lay_out(positions, picture, position)
        position += max(picture.canvas) + 1
        done, previous = picture.stop, picture
    positions[:, done:] = torch.arange(len(tokens) - done) + position
    return torch.cat([torch.arange(len(tokens))[None], positions])


def _pictures(
    tokens: list[int], kinds: list[int], sizes: Sequence[Size], markers: Markers
) -> Iterator[Picture]:
    """Yield pictures with their slices; a crop after a slice's start belongs to the picture before it."""
    remaining = iter(sizes)
    pictures: list[Picture] = []
    for kind, run in itertools.groupby(range(len(tokens)), lambda index: kinds[index]):
        if kind == 0:
            continue
        indices = list(run)
        crop = Crop(indices[0], indices[-1] + 1, next(remaining))
        if pictures and tokens[crop.start - 1] == markers.slice_start:
            pictures[-1].slices.append(crop)
        else:
            pictures.append(Picture(crop))
    for picture in pictures:
        picture.stop = (picture.slices or [picture.whole])[-1].stop
        while picture.stop < len(tokens) and tokens[picture.stop] in markers:
            picture.stop += 1
    yield from pictures


def _only_markers(tokens: list[int], one: Picture, other: Picture, markers: Markers) -> bool:
    last = (one.slices or [one.whole])[-1]
    return all(token in markers for token in tokens[last.stop : other.start])


def _lay_out(positions: Tensor, picture: Picture, origin: int) -> None:
    """Write the positions of a picture's tokens and markers."""
    whole, slices, columns, canvas = picture.whole, picture.slices, picture.columns, picture.canvas
    positions[:, picture.start : picture.stop] = origin
    positions[1:, picture.start] = max(origin - 1, 0)
    if whole.stop < picture.stop:
        positions[1:, whole.stop] = origin + torch.tensor(canvas)
    positions[1:, whole.start : whole.stop] = origin + _grid(whole.size, canvas)
    for number, one in enumerate(slices):
        corner = torch.tensor([number // columns * slices[0].size[0], number % columns * slices[0].size[1]])
        positions[1:, one.start - 1] = origin + corner
        if one.stop < picture.stop:
            positions[1:, one.stop] = origin + corner + torch.tensor(one.size) - 1
        positions[1:, one.start : one.stop] = origin + corner[:, None] + _grid(one.size, one.size)
    for number, (one, other) in enumerate(itertools.pairwise(slices)):
        if other.start - one.stop > 2:  # a line break
            edge = torch.tensor([(number // columns + 1) * slices[0].size[0] - 1, canvas[1]])
            positions[1:, one.stop + 1 : other.start - 1] = (origin + edge)[:, None]


def _grid(size: Size, canvas: Size) -> Tensor:
    """Return rows and columns (2, height x width) of tokens that are spread over a canvas."""
    rows, columns = (
        torch.linspace(0, edge - 1, count).round().long() for edge, count in zip(canvas, size, strict=True)
    )
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij")).flatten(1)
