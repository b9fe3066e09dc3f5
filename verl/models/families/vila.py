# SPDX-License-Identifier: Apache-2.0
r"""VILA, NVILA and LongVILA (https://arxiv.org/abs/2412.04468): images as tiles, videos as frames.

Each tile of an image and each frame of a video is followed by a newline, which is an ordinary token::

    <image>...\n                                  an image of one tile, or of several scales (`dynamic_s2`)
    <image>...\n\n<image>...\n\n                 each tile of an image (`dynamic`), the whole image last
    <vila/video>...\n<vila/video>...\n            the frames of a video

VILA's own processor cuts only the image of a prompt with a single one; here each image of a prompt is cut.

vLLM knows no VILA: the engine is the language model alone, which reads prompts as embeddings.
Facts of an image: `grids`, rows and columns of tiles of each scaled copy; of a video: `frames`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verl.models.families.interface import (
    ExampleRow,
    Medium,
    MediumShape,
    Sense,
    VisionFamily,
    example_pixels,
)
from verl.models.families.tiny_sizes import TEXT, VISION, TinyModel
from verl.models.vila.config import PARTS, PROJECTOR, TOKENS, TOWER, VilaConfig
from verl.models.vila.processor import VilaProcessor, Wrapping, grids, image_units, passes

TILE = 56  # pixels of a tiny model's tiles, of 4 tokens
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def tiny_processor(tokenizer: Any) -> VilaProcessor:
    """Return a processor for tiles of 56 pixels."""
    ids = {option: tokenizer.vocab[token] for option, token in TOKENS.items()}
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return VilaProcessor(tokenizer, settings, VilaConfig(**TINY_PARTS, **TINY_OPTIONS, **ids))


TINY_OPTIONS: dict[str, Any] = {"image_aspect_ratio": "dynamic", "max_tiles": 4}
TINY_VISION = VISION | dict(
    model_type="siglip_vision_model", num_hidden_layers=3, image_size=TILE, patch_size=14
)
TINY_PARTS: dict[str, Any] = {"text_config": {"model_type": "qwen2"}, "vision_config": TINY_VISION}


class Vila(VisionFamily):
    """VILA models with a SigLIP tower."""

    kinds = ("image", "video")
    folders = PARTS
    embeds_prompts = True
    media_owner, tower, projector = "", TOWER, PROJECTOR
    tiny: ClassVar = {
        "vila": TinyModel(
            "vila",
            TEXT | {"model_type": "qwen2"},
            TINY_VISION,
            options=TINY_OPTIONS,
            special_tokens=tuple(TOKENS.values()),
            token_ids=TOKENS,
            image=TOKENS["image_token_id"],
            video=TOKENS["video_token_id"],
            processor=tiny_processor,
            keeps_words=False,
        )
    }

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        shape = grids(processor.config, height, width)
        return MediumShape(processor.image_tokens(shape), {"grids": [list(grid) for grid in shape]})

    def video_shape(
        self, processor: Any, num_frames: int, height: int, width: int, meta: Mapping[str, Any]
    ) -> MediumShape:
        return MediumShape(processor.video_tokens(num_frames), {"frames": num_frames})

    def image_inputs(self, processor: Any, image: Image.Image) -> dict[str, Tensor]:
        return {PIXELS["image"]: processor.image_pixels(image)}

    def video_inputs(self, processor: Any, frames: np.ndarray, meta: Mapping[str, Any]) -> dict[str, Tensor]:
        return {PIXELS["video"]: processor.frame_pixels(frames)}

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Any]:
        inputs: dict[str, Any] = dict(super().own_inputs(media))
        inputs["image_grids"] = [_grids(medium.facts) for medium in media if medium.kind == "image"]
        inputs["video_frames"] = [medium.facts["frames"] for medium in media if medium.kind == "video"]
        return inputs

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        pixels = [medium.tensors[PIXELS[medium.kind]] for medium in media]
        patches = owner.patch_features(torch.cat(pixels)).split([len(part) for part in pixels])
        return [
            owner.image_features(part, _grids(medium.facts))
            if medium.kind == "image"
            else owner.video_features(part)
            for medium, part in zip(media, patches, strict=True)
        ]

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        if "grids" in facts:
            return image_units(config, _grids(facts))
        sizes = [size for count, size in passes(config, facts["frames"]) for _ in range(count)]
        is_pooled = Wrapping.of(config.video_encoder).pools != Wrapping.pools
        return [sum(sizes)] if is_pooled else sizes

    def cut(self, config: Any, medium: Medium, first: int, stop: int) -> Medium:
        if len(self.units(config, medium.facts)) == 1:
            return medium
        count = stop - first
        facts = {"grids": [[1, count]]} if medium.kind == "image" else {"frames": count}
        tensors = {name: pixels[first:stop] for name, pixels in medium.tensors.items()}
        return medium._replace(tensors=tensors, facts=facts)

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        edge = config.vision_config.image_size
        shape = grids(config, edge, edge)
        facts = {"grids": [list(grid) for grid in shape]}
        size = (sum(map(math.prod, shape)), config.vision_config.num_channels, edge, edge)
        ids = torch.full((sum(self.units(config, facts)),), config.image_token_id)
        return ExampleRow(ids, [Medium("image", {PIXELS["image"]: example_pixels(size, generator)}, facts)])

    def patches_per_token(self, config: Any, sense: Sense) -> int:
        return config.downsampling**2

    def frame_factor(self, processor: Any) -> int:
        return round(processor.config.scales[0] / processor.config.tile_side)

    def smallest_frame(self, processor: Any) -> int:
        return processor.config.tile_side**2  # of every frame


def _grids(facts: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(rows, columns) for rows, columns in facts["grids"]]
