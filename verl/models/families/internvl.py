# SPDX-License-Identifier: Apache-2.0
r"""InternVL (https://arxiv.org/abs/2504.10479) in transformers' format: images as tiles, videos as frames.

Images are cut into tiles of one size, with the whole image as the last one if there are several. Each tile,
and each frame of a video, is `image_seq_length` tokens::

    <img><IMG_CONTEXT>...</img>
    Frame1: <img><IMG_CONTEXT>...</img>\nFrame2: <img><IMG_CONTEXT>...</img>

Images and videos share the token that features replace, so features are in the order of the prompt.
Facts of a medium: `tiles`, of an image or frames of a video.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verl.models.families.interface import ExampleRow, Kind, Medium, MediumShape, VisionFamily, example_pixels
from verl.models.families.tiny_sizes import TEXT, VISION, TinyModel, square, tiny_processor

TILE = 56  # pixels of a tiny model's tiles, of 4 tokens
TOKENS = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip


class InternVL(VisionFamily):
    """InternVL3 and InternVL3.5."""

    kinds = ("image", "video")
    takes_features, takes_video_features = True, False
    engine_schemas = ("vllm.model_executor.models.interns1:InternS1ImageEmbeddingInputs",)
    tiny: ClassVar = {
        "internvl": TinyModel(
            "internvl",
            TEXT | {"model_type": "qwen3"},
            VISION | dict(image_size=TILE, patch_size=14),
            options={"image_seq_length": 4},
            special_tokens=tuple(TOKENS.values()),
            named_tokens=TOKENS,
            token_ids={"image_token_id": TOKENS["context_image_token"]},
            image=TOKENS["context_image_token"] + "\n",
            video=TOKENS["video_token"] + "\n",
            processor=partial(
                tiny_processor, "InternVLProcessor", image_seq_length=4,
                image_processor=("GotOcr2ImageProcessor", {"size": square(TILE), "max_patches": 4}),
                video_processor=("InternVLVideoProcessor", {"size": square(TILE)}),
            ),
        )
    }  # fmt: skip

    def placeholders(self, processor: Any) -> dict[int, Kind]:
        video = processor.tokenizer.convert_tokens_to_ids(processor.video_token)
        return {processor.image_token_id: "image", video: "video"}

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        tiles = processor.image_processor.get_number_of_image_patches(
            height, width, _image_options(processor)
        )
        return MediumShape(_tile_tokens(processor, tiles), {"tiles": tiles})

    def video_shape(
        self, processor: Any, num_frames: int, height: int, width: int, meta: Mapping[str, Any]
    ) -> MediumShape:
        frame, tokens = _tile_tokens(processor, 1), []
        for number in range(1, num_frames + 1):
            title = f"Frame{number}: " if number == 1 else f"\nFrame{number}: "
            tokens += processor.tokenizer.encode(title, add_special_tokens=False) + frame
        return MediumShape(tokens, {"tiles": num_frames})

    def token_kind(self, kind: Kind) -> Kind:
        return "image"

    def image_inputs(self, processor: Any, image: Image.Image) -> dict[str, Tensor]:
        made = processor.image_processor(images=[image], return_tensors="pt", **_image_options(processor))
        return {"pixel_values": made["pixel_values"]}

    def video_inputs(self, processor: Any, frames: np.ndarray, meta: Mapping[str, Any]) -> dict[str, Tensor]:
        made = processor.video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
        return {"pixel_values": made["pixel_values_videos"][0]}

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        pixels = torch.cat([medium.tensors["pixel_values"] for medium in media])
        tiles = owner.get_image_features(pixels, return_dict=True).pooler_output  # (tiles, tokens, hidden)
        counts = [medium.facts["tiles"] for medium in media]
        return [part.flatten(0, 1) for part in tiles.split(counts)]

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        return [config.image_seq_length] * facts["tiles"]

    def cut(self, config: Any, medium: Medium, first: int, stop: int) -> Medium:
        pixels = medium.tensors["pixel_values"][first:stop]
        return medium._replace(tensors={"pixel_values": pixels}, facts={"tiles": stop - first})

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        tiles = 1 if generator is None else 2
        size = (tiles, config.vision_config.num_channels, *config.vision_config.image_size)
        pixels = example_pixels(size, generator)
        facts = {"tiles": tiles}
        ids = torch.full((sum(self.units(config, facts)),), config.image_token_id)
        return ExampleRow(ids, [Medium("image", {"pixel_values": pixels}, facts)])

    def frame_factor(self, processor: Any) -> int:
        return round(processor.video_processor.size["height"] / processor.image_seq_length**0.5)

    def smallest_frame(self, processor: Any) -> int:
        return processor.image_seq_length  # of every frame


def _image_options(processor: Any) -> dict[str, Any]:
    """Return the options that the processor itself gives to its image processor."""
    return dict(processor.valid_processor_kwargs._defaults["images_kwargs"])


def _tile_tokens(processor: Any, tiles: int) -> list[int]:
    features = [processor.image_token_id] * (processor.image_seq_length * tiles)
    return [processor.start_image_token_id, *features, processor.end_image_token_id]
