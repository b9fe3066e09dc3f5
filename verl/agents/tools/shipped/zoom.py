# SPDX-License-Identifier: Apache-2.0
"""Crop and enlarge a region of an image in the conversation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from verl.agents.interface import CallRefusedError, Observation
from verl.data.media.references import openable
from verl.rewards.turns import nearest_float
from verl.utils.images import open_image, to_rgb

UNITS = {"pixels": None, "thousandths": 1000.0, "fractions": 1.0}  # the size of an image in each
MAX_RATIO = 100  # of the sides of a part; vision models refuse narrower images


class Zoom:
    """Shows a part of an image larger.

    Args:
        units: Units of the policy's boxes: `pixels`, `thousandths` of width and height, or `fractions`.
        max_pixels: Pixels to which larger images are shrunk for the policy, `data.max_pixels`: boxes in
            `pixels` refer to what it sees.
        min_pixels: The same for smaller images: `data.min_pixels`.
        size: Pixels of the longer side of an enlarged part; a larger part keeps its size.
        image_key: Column of the images in a row; `images` has those of the prompt.
    """

    name = "zoom"

    def __init__(
        self,
        units: str = "pixels",
        max_pixels: int | None = None,
        min_pixels: int | None = None,
        size: int = 672,
        image_key: str = "images",
    ) -> None:
        if units not in UNITS:
            raise ValueError(f"`units` must be one of {list(UNITS)}, got {units!r}")
        if size < 1:
            raise ValueError(f"`size` must be at least 1, got {size}")
        self.units, self.size, self.image_key = units, size, image_key
        self.max_pixels, self.min_pixels = max_pixels or math.inf, min_pixels or 0

    def create(self, row: Mapping[str, Any]) -> list[Any]:
        """Return the images: the row's, to which each enlarged part is added."""
        images = row.get(self.image_key)
        return [] if images is None else list(images)

    def __call__(self, images: list[Any], box: list[float], image: int = 1) -> Observation:
        """Look closer: show a part of an image enlarged.

        Args:
            box: Left, top, right and bottom edge of the part.
            image: Number of the image, from 1; enlarged parts are counted after the given images.
        """
        if not 1 <= image <= len(images):
            raise CallRefusedError(f"there is no image {image}: there are {len(images)}")
        if len(box) != 4:
            raise CallRefusedError(f"a box has 4 edges: left, top, right, bottom; got {len(box)}")
        source = images[image - 1]
        source = source if isinstance(source, Image.Image) else open_image(openable(source))
        part = self._part(to_rgb(source), [nearest_float(edge) for edge in box])
        images.append(part)
        return Observation(f"Image {len(images)}: this part of image {image}.", [part])

    def _part(self, image: Image.Image, box: Sequence[float]) -> Image.Image:
        width, height = self._size_in_units(image.size)
        left, right = (max(0.0, min(box[side] / width, 1.0)) * image.width for side in (0, 2))
        top, bottom = (max(0.0, min(box[side] / height, 1.0)) * image.height for side in (1, 3))
        edges = math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)
        sides = edges[2] - edges[0], edges[3] - edges[1]
        if min(sides) < 1:
            raise CallRefusedError(
                f"the box {list(box)} has no area inside the image, whose width is {width:g} and height"
                f" {height:g}; give left < right and top < bottom"
            )
        if max(sides) > MAX_RATIO * min(sides):
            raise CallRefusedError(
                f"the box {list(box)} is too narrow: one side is over {MAX_RATIO} times the other"
            )
        scale = max(1.0, self.size / max(sides))
        part = image.crop(edges)
        return part.resize(
            (round(sides[0] * scale) or 1, round(sides[1] * scale) or 1), Image.Resampling.BICUBIC
        )

    def _size_in_units(self, size: tuple[int, int]) -> tuple[float, float]:
        whole = UNITS[self.units]
        if whole is not None:
            return whole, whole
        pixels = size[0] * size[1]
        scale = math.sqrt(min(max(pixels, self.min_pixels), self.max_pixels) / pixels)
        return round(size[0] * scale), round(size[1] * scale)
