# SPDX-License-Identifier: Apache-2.0
"""Mistral Small 3.1, 3.2 and Ministral 3: a Pixtral tower for images of any size, and a patch merger.

An image is rows of `[IMG]` tokens, one for each square of merged patches. `[IMG_BREAK]` ends each row except
the last one, which `[IMG_END]` ends; these two tokens have no features.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from verl.models.families.interface import (
    ExampleRow,
    Family,
    Medium,
    MediumShape,
    Sense,
    VisionFamily,
    example_pixels,
)
from verl.models.families.tiny_sizes import TEXT, VISION, TinyModel, tiny_processor

TINY_EPSILON = {"rms_norm_eps": 1e-5}  # the projector's too; vLLM has a constant
# Ministral 3 enlarges queries after each `original_max_position_embeddings` tokens.
TINY_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
TINY_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def _tiny(text: dict[str, Any]) -> TinyModel:
    return TinyModel(
        "mistral3",
        TEXT | TINY_EPSILON | text,
        VISION | dict(patch_size=14, image_size=224),
        special_tokens=TINY_TOKENS,
        token_ids={"image_token_index": "[IMG]"},
        image="[IMG]",
        processor=partial(
            tiny_processor, "PixtralProcessor", patch_size=14, spatial_merge_size=2,
            image_processor=("PixtralImageProcessor", {"patch_size": 14, "size": {"longest_edge": 224}}),
        ),
    )  # fmt: skip


class Ministral3(Family):
    """The language models of Ministral 3."""

    def engine_overrides(self, config: Any) -> dict[str, Any]:
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        if rope.get("llama_4_scaling_beta") is None:
            return {}
        # vLLM (0.32) reads it from Mistral's own format only; without it log-probs are off by 0.16.
        scaling = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
        return {"llama_4_scaling": {"beta": rope["llama_4_scaling_beta"], **scaling}}


class Mistral3(Ministral3, VisionFamily):
    """Mistral 3; facts of an image: `image_size`, height and width after resizing, and `features`."""

    tiny: ClassVar = {
        "mistral3": _tiny({"model_type": "mistral", "sliding_window": None}),
        "ministral3": _tiny({"model_type": "ministral3", "rope_parameters": TINY_YARN}),
    }

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        token = _token_edge(processor)
        longest = processor.image_processor.size["longest_edge"]
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = (-(-edge // token) for edge in (height, width))
        row = [processor.image_token_id] * columns
        tokens = [*row, processor.image_break_token_id] * rows
        tokens[-1] = processor.image_end_token_id
        facts = {"image_size": [rows * token, columns * token], "features": rows * columns}
        return MediumShape(tokens, facts)

    def image_inputs(self, processor: Any, image: Image.Image) -> dict[str, Tensor]:
        # The image processor's own `patch_size` is not that of merged patches.
        patch = _token_edge(processor)
        made = processor.image_processor(images=[image], patch_size=patch, return_tensors="pt")
        return {"pixel_values": made["pixel_values"]}

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        pixels = _padded_pixels(media)
        return {"pixel_values": pixels, "image_sizes": torch.tensor(_sizes(media), device=pixels.device)}

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        # Like `get_image_features`, which keeps the output of all layers, and reads back the sizes.
        sizes, layer = _sizes(media), owner.config.vision_feature_layer
        patches = [math.prod(size) // owner.config.vision_config.patch_size**2 for size in sizes]
        encoded = owner.vision_tower(
            _padded_pixels(media),
            image_sizes=sizes,
            cu_seq_lens_q=nn.functional.pad(torch.tensor(patches).cumsum(0), (1, 0)).to(torch.int32),
            output_hidden_states=layer != -1,
            return_dict=True,
        )
        hidden = encoded.last_hidden_state if layer == -1 else encoded.hidden_states[layer]
        projected = owner.multi_modal_projector(hidden[0], sizes)
        return list(projected.split([medium.facts["features"] for medium in media]))

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        vision = config.vision_config
        rows, columns = (1, 1) if generator is None else (2, 3)  # in tokens
        size = [edge * vision.patch_size * config.spatial_merge_size for edge in (rows, columns)]
        shape = (1, vision.num_channels, *size)
        pixels = example_pixels(shape, generator)
        medium = Medium("image", {"pixel_values": pixels}, {"image_size": size, "features": rows * columns})
        return ExampleRow(torch.tensor([config.image_token_index] * (rows * columns)), [medium])

    def patches_per_token(self, config: Any, sense: Sense) -> int:
        return config.spatial_merge_size**2

    def frame_factor(self, processor: Any) -> int:
        return _token_edge(processor)


def _token_edge(processor: Any) -> int:
    """Return height and width in pixels of the square that a token stands for."""
    return processor.patch_size * processor.spatial_merge_size


def _sizes(media: Sequence[Medium]) -> list[list[int]]:
    return [medium.facts["image_size"] for medium in media]


def _padded_pixels(media: Sequence[Medium]) -> Tensor:
    """Join images (1, C, H, W) of different sizes, padded below and to the right; the tower cuts it off."""
    height, width = (max(edges) for edges in zip(*_sizes(media), strict=True))
    return torch.cat([
        nn.functional.pad(pixels, (0, width - pixels.shape[-1], 0, height - pixels.shape[-2]))
        for pixels in (medium.tensors["pixel_values"] for medium in media)
    ])  # fmt: skip
