# SPDX-License-Identifier: Apache-2.0
"""Tiles of VILA's images, and the texts around the features of its media."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verl.models.vila.config import VilaConfig

Grid = tuple[int, int]  # rows and columns of tiles
ONE: Grid = (1, 1)
BASIC, POOLED = ("BasicImageEncoder", "BasicVideoEncoder"), "TSPVideoEncoder"


def grids(config: VilaConfig, height: int, width: int) -> list[Grid]:
    """Return the grid of each scaled copy of an image; `dynamic` has the whole image as the last one.

    With `dynamic_s2` (https://arxiv.org/abs/2412.04468, section 3.1) all copies but the last are square.
    """
    if config.image_aspect_ratio == "dynamic":
        grid = closest_grid(
            height, width, config.vision_config.image_size, config.min_tiles, config.max_tiles
        )
        return [grid] if grid == ONE else [grid, ONE]
    if config.image_aspect_ratio == "dynamic_s2":
        edges = [scale // config.scales[0] for scale in config.scales]
        last = closest_grid(height, width, config.scales[0], edges[-1] ** 2, config.max_tiles)
        return [*((edge, edge) for edge in edges[:-1]), last]
    return [ONE]


def closest_grid(height: int, width: int, tile: int, least: int | None, most: int | None) -> Grid:
    """Return the grid of `least` to `most` tiles whose shape is closest to the image's.

    Of several grids of that shape it is the largest of which the image covers more than half.
    """
    least, most = least or 1, most or 1
    found, smallest = ONE, math.inf
    sides = range(1, most + 1)
    choices = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    for columns, rows in sorted(choices, key=math.prod):
        apart = abs(width / height - columns / rows)
        is_covered = height * width > 0.5 * tile**2 * columns * rows
        if apart < smallest or (apart == smallest and is_covered):
            found, smallest = (rows, columns), apart
    return found


class ImageSettings:
    """The settings of the tower's image processor, as its file has them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values, self.size = values, values["size"]

    def to_json_string(self) -> str:
        """Return the settings as JSON; media are cached under them."""
        return json.dumps(self.values, indent=2, sort_keys=True)

    def pixels(self, image: Image.Image, shape: list[Grid], *, pads: bool) -> Tensor:
        """Return the tiles of an RGB image, grid by grid and row by row: (tiles, 3, tile, tile) float32."""
        mean, std = self.values["image_mean"], self.values["image_std"]
        if pads:
            image = _padded(image, mean)
        tiles = [np.asarray(tile, dtype=np.float32) for grid in shape for tile in self._cut(image, grid)]
        scaled = np.stack(tiles) / np.float32(255)
        normalized = (scaled - np.array(mean, np.float32)) / np.array(std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(normalized.transpose(0, 3, 1, 2)))

    def _cut(self, image: Image.Image, grid: Grid) -> Iterator[Image.Image]:
        tile, (rows, columns) = self.size["height"], grid
        resized = image.resize((columns * tile, rows * tile))  # bicubic
        for top in range(0, rows * tile, tile):
            for left in range(0, columns * tile, tile):
                yield resized.crop((left, top, left + tile, top + tile))


def _padded(image: Image.Image, mean: Sequence[float]) -> Image.Image:
    side = max(image.size)
    square = Image.new("RGB", (side, side), tuple(int(value * 255) for value in mean))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


@dataclass(frozen=True)
class Wrapping:
    """The texts around features, and the pooling of a video's: time, height and width of each pass.

    With several passes, a video's features are those of all passes, one after another.
    """

    start: str = ""  # before each image or frame
    end: str = "\n"  # after it
    between: str = ""  # after each pass
    pools: tuple[tuple[int, int, int], ...] = ((1, 1, 1),)

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | None) -> "Wrapping":
        """Read `image_encoder` or `video_encoder` of a config, perhaps as JSON."""
        options = json.loads(given) if isinstance(given, str) else dict(given or {})
        name = str(options.get("_target_", BASIC[0])).rpartition(".")[2]
        if name not in (*BASIC, POOLED):
            raise ValueError(f"an encoder of media must be {', '.join(BASIC)} or {POOLED}, got {name}")
        pools = [(time, height, width) for time, height, width in options.get("pool_sizes", ())]
        return cls(
            options.get("start_tokens") or "",
            options.get("end_tokens", "\n") or "",
            options.get("sep_tokens") or "",
            tuple(pools) or cls.pools,
        )


def image_units(config: VilaConfig, shape: Sequence[Grid]) -> list[int]:
    """Return the features of each part of an image: its tiles, or all of its scales together."""
    tile = config.tile_side**2
    if config.dynamic_s2:
        return [tile * math.prod(shape[config.s2_resize_output_to_scale_idx or 0])]
    return [tile] * sum(map(math.prod, shape))


def passes(config: VilaConfig, num_frames: int) -> list[tuple[int, int]]:
    """Return the frames of each pass over a video, and the features of one.

    Raises:
        ValueError: Their number is not a multiple of the number that is averaged.
    """
    found = []
    for time, height, width in Wrapping.of(config.video_encoder).pools:
        if num_frames % time:
            raise ValueError(
                f"the model averages {time} frames, {num_frames} of a video do not divide by that: set"
                " `worker.rollout.num_video_frames` to a multiple"
            )
        found.append((num_frames // time, config.tile_side // height * (config.tile_side // width)))
    return found
