# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision (https://arxiv.org/abs/2408.03326): images at any resolution, videos as pooled frames.

An image is scaled and padded to the best of some resolutions, and cut into a grid of square tiles. Its
features are those of the whole image as one tile, then those of the grid, row by row: without the padding,
reduced if there are too many, with `image_newline` after each row. A frame of a video is one tile, whose
features are halved in height and width; `image_newline` is after the last frame.

Each image of a prompt is cut into tiles, as in vLLM; transformers' `apply_chat_template` shows several images
in one tile each instead.

The units of an image are the whole image and each row of tiles, or the whole grid if it is reduced; those of
a video are its frames. Facts of a medium: `unit_tiles` and `unit_features`, their numbers in each unit; of an
image also `size`, height and width in pixels, `tiles`, rows and columns of the grid, and `first_unit`; of a
video also `is_end`, whether the newline follows.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from verl.models.families.interface import (
    ExampleRow,
    Kind,
    Medium,
    MediumShape,
    Sense,
    VisionFamily,
    example_pixels,
)
from verl.models.families.tiny_sizes import TEXT, VISION, TinyModel, square, tiny_processor

TILE = 72  # pixels of a tiny model's tiles, of 25 patches; some pixels are unused, as in real models
PIXELS: dict[Kind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
LEAST_REDUCTION = 1.1  # images that are too large by less stay as they are
TOKENS = {"image_token_index": "<image>", "video_token_index": "<video>"}
RESOLUTIONS = [[rows * TILE, columns * TILE] for rows in range(1, 5) for columns in range(1, 5)]


class Grid(NamedTuple):
    """The features of an image's grid of tiles, in features."""

    side: int  # of a tile
    tiles: tuple[int, int]  # rows and columns
    rows: tuple[int, int]  # first and stop, without padding
    columns: tuple[int, int]
    reduced: tuple[int, int] | None  # height and width after reduction

    @classmethod
    def of(cls, side: int, size: Sequence[int], tiles: Sequence[int], limit: str) -> "Grid":
        """Find the features of an image of this size in pixels; `limit` in tiles is like "anyres_max_9"."""
        (height, width), (rows, columns) = size, (side * count for count in tiles)
        above = left = 0
        if width / height > columns / rows:
            above = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        kept = rows - 2 * above, columns - 2 * left
        excess = math.sqrt(math.prod(kept) / (int(limit.removeprefix("anyres_max_")) * side**2))
        reduced = (int(kept[0] // excess), int(kept[1] // excess)) if excess > LEAST_REDUCTION else None
        return cls(side, (tiles[0], tiles[1]), (above, rows - above), (left, columns - left), reduced)

    def unit_features(self) -> list[int]:
        whole = self.side**2
        if self.reduced is not None:
            return [whole, self.reduced[0] * (self.reduced[1] + 1)]
        width = self.columns[1] - self.columns[0] + 1
        return [whole, *(len(self.rows_of(row)) * width for row in range(self.tiles[0]))]

    def facts(self, size: Sequence[int]) -> dict[str, Any]:
        return {
            "size": list(size), "tiles": list(self.tiles), "first_unit": 0,
            "unit_tiles": self.unit_tiles(), "unit_features": self.unit_features(),
        }  # fmt: skip

    def rows_of(self, row: int) -> range:
        """Return the rows of features of a row of tiles; none if it is padding."""
        first = max(self.rows[0], row * self.side)
        return range(first, max(first, min(self.rows[1], (row + 1) * self.side)))

    def unit_tiles(self) -> list[int]:
        rows, columns = self.tiles
        return [1, *([columns] * rows if self.reduced is None else [rows * columns])]

    def features(self, unit: int, tiles: Tensor, newline: Tensor) -> Tensor:
        """Arrange the features of a unit's tiles (tiles, side^2, H): (tokens, H)."""
        if unit == 0:
            return tiles[0]
        rows = len(tiles) // self.tiles[1]
        joined = tiles.view(rows, self.tiles[1], self.side, self.side, -1).transpose(1, 2)
        joined = joined.reshape(rows * self.side, self.tiles[1] * self.side, -1)  # (height, width, H)
        if self.reduced is None:
            kept, start = self.rows_of(unit - 1), (unit - 1) * self.side
            joined = joined[kept.start - start : kept.stop - start, slice(*self.columns)]
        else:
            joined = joined[slice(*self.rows), slice(*self.columns)].permute(2, 0, 1)
            joined = interpolate(joined[None], self.reduced, mode="bilinear")[0].permute(1, 2, 0)
        ends = newline.to(joined.dtype).expand(len(joined), 1, -1)
        return torch.cat([joined, ends], 1).flatten(0, 1)


class LlavaOnevision(VisionFamily):
    """LLaVA-OneVision with Qwen2 as its language model."""

    kinds = ("image", "video")
    takes_features, takes_video_features = True, False
    engine_schemas = ("vllm.model_executor.models.llava_onevision:LlavaOnevisionImageEmbeddingInputs",)
    tiny: ClassVar = {
        "llava_onevision": TinyModel(
            "llava_onevision",
            TEXT,
            VISION
            | dict(model_type="siglip_vision_model", image_size=TILE, patch_size=14, vision_use_head=False),
            options={"image_grid_pinpoints": RESOLUTIONS},
            special_tokens=tuple(TOKENS.values()),
            token_ids=TOKENS,
            image=TOKENS["image_token_index"] + "\n",
            video=TOKENS["video_token_index"] + "\n",
            processor=partial(
                tiny_processor, "LlavaOnevisionProcessor", num_image_tokens=(TILE // 14) ** 2,
                image_processor=(
                    "LlavaOnevisionImageProcessor",
                    {"size": square(TILE), "image_grid_pinpoints": RESOLUTIONS},
                ),
                video_processor=("LlavaOnevisionVideoProcessor", {"size": square(TILE)}),
                vision_feature_select_strategy="full",
            ),
        )
    }  # fmt: skip

    @property
    def encoders(self) -> dict[Sense, tuple[str, ...]]:
        return {"vision": (self.tower, "model.multi_modal_projector", "model.image_newline")}

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        images, size = processor.image_processor, (height, width)
        tile = images.size.get("height") or images.size["shortest_edge"]
        tiles = best_tiles(size, images.image_grid_pinpoints, tile)
        grid = Grid.of(math.isqrt(processor.num_image_tokens), size, tiles, processor.vision_aspect_ratio)
        facts = grid.facts(size)
        return MediumShape([processor.image_token_id] * sum(facts["unit_features"]), facts)

    def video_shape(
        self, processor: Any, num_frames: int, height: int, width: int, meta: Mapping[str, Any]
    ) -> MediumShape:
        frame = _pooled_side(processor) ** 2
        features = [frame] * (num_frames - 1) + [frame + 1]
        facts = {"unit_tiles": [1] * num_frames, "unit_features": features, "is_end": True}
        return MediumShape([processor.video_token_id] * sum(features), facts)

    def image_inputs(self, processor: Any, image: Image.Image) -> dict[str, Tensor]:
        made = processor.image_processor(images=[image], return_tensors="pt")
        return {PIXELS["image"]: made["pixel_values"][0]}  # (tiles, 3, height, width)

    def video_inputs(self, processor: Any, frames: np.ndarray, meta: Mapping[str, Any]) -> dict[str, Tensor]:
        made = processor.video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
        return {PIXELS["video"]: made["pixel_values_videos"][0]}

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        inputs = {}
        pixels = {kind: [m.tensors[name] for m in media if m.kind == kind] for kind, name in PIXELS.items()}
        if pixels["image"]:
            inputs["pixel_values"] = torch.cat(pixels["image"])
            sizes = [medium.facts["size"] for medium in media if medium.kind == "image"]
            inputs["image_sizes"] = torch.tensor(sizes)
        if pixels["video"]:
            lengths = sorted({len(frames) for frames in pixels["video"]})
            if len(lengths) > 1:
                raise ValueError(
                    f"transformers' LLaVA-OneVision reads videos of one length together, got {lengths} frames"
                )
            inputs["pixel_values_videos"] = torch.stack(pixels["video"])
        return inputs

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        pixels = [medium.tensors[PIXELS[medium.kind]] for medium in media]
        tiles = _tile_features(owner, torch.cat(pixels)).split([len(part) for part in pixels])
        arrange = {"image": _image_features, "video": _video_features}
        return [
            arrange[medium.kind](owner, medium.facts, part) for medium, part in zip(media, tiles, strict=True)
        ]

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        return facts["unit_features"]

    def cut(self, config: Any, medium: Medium, first: int, stop: int) -> Medium:
        facts = dict(medium.facts)
        before, count = sum(facts["unit_tiles"][:first]), sum(facts["unit_tiles"][first:stop])
        if medium.kind == "image":
            facts["first_unit"] += first
        else:
            facts["is_end"] = facts["is_end"] and stop == len(facts["unit_tiles"])
        for name in ("unit_tiles", "unit_features"):
            facts[name] = facts[name][first:stop]
        tensors = {name: pixels[before : before + count] for name, pixels in medium.tensors.items()}
        return medium._replace(tensors=tensors, facts=facts)

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        vision = config.vision_config
        tile = vision.image_size
        # An image of several tiles has padding.
        size = (tile, tile) if generator is None else (tile // 2, tile + tile // 4)
        tiles = best_tiles(size, config.image_grid_pinpoints, tile)
        grid = Grid.of(tile // vision.patch_size, size, tiles, config.vision_aspect_ratio)
        facts = grid.facts(size)
        shape = (sum(facts["unit_tiles"]), vision.num_channels, tile, tile)
        pixels = example_pixels(shape, generator)
        ids = torch.full((sum(facts["unit_features"]),), config.image_token_id)
        return ExampleRow(ids, [Medium("image", {"pixel_values": pixels}, facts)])

    def frame_factor(self, processor: Any) -> int:
        return -(-processor.video_processor.size["height"] // _pooled_side(processor))

    def smallest_frame(self, processor: Any) -> int:
        return _pooled_side(processor) ** 2  # of every frame


def _pooled_side(processor: Any) -> int:
    return -(-math.isqrt(processor.num_image_tokens) // 2)


def best_tiles(size: tuple[int, int], choices: list[list[int]], tile: int) -> tuple[int, int]:
    """Return rows and columns of the grid for an image of this size, all in pixels."""
    from transformers.image_processing_utils import select_best_resolution  # noqa: PLC0415 - torchvision

    height, width = select_best_resolution(size, choices)
    return height // tile, width // tile


def _tile_features(owner: Any, pixels: Tensor) -> Tensor:
    """Compute the features of tiles and frames: (tiles, 3, height, width) to (tiles, side^2, H)."""
    config = owner.config
    states = owner.vision_tower(
        pixels.to(owner.dtype), output_hidden_states=True, return_dict=True
    ).hidden_states
    layers = config.vision_feature_layer
    layers = [layers] if isinstance(layers, int) else layers
    chosen = torch.cat([states[layer] for layer in layers], -1)
    if config.vision_feature_select_strategy == "default":
        chosen = chosen[:, 1:]  # without the class token
    return owner.multi_modal_projector(chosen)


def _image_features(owner: Any, facts: Mapping[str, Any], tiles: Tensor) -> Tensor:
    side = math.isqrt(tiles.shape[1])
    grid = Grid.of(side, facts["size"], facts["tiles"], owner.config.vision_aspect_ratio)
    units = tiles.split(facts["unit_tiles"])
    parts = [
        grid.features(number, unit, owner.image_newline)
        for number, unit in enumerate(units, start=facts["first_unit"])
    ]
    return torch.cat(parts)


def _video_features(owner: Any, facts: Mapping[str, Any], frames: Tensor) -> Tensor:
    features = owner.apply_pooling(frames).flatten(0, 1)
    newline = owner.image_newline[None].to(features.dtype)
    return torch.cat([features, newline]) if facts["is_end"] else features
