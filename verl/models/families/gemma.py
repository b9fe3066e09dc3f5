# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and Gemma 4: tokens of an image attend to each other, and count as plain positions.

Gemma 3 resizes each image to one size. Gemma 4 keeps the aspect ratio within a budget of tokens; a video is
frames after their time as text.
"""

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from verl.models.attention.kernels import FULL, SLIDING
from verl.models.families.interface import (
    ExampleRow,
    Kind,
    MediaShape,
    Medium,
    MediumShape,
    Sense,
    VisionFamily,
    example_pixels,
    join_tensors,
    processed_video,
)
from verl.models.families.tiny_sizes import TEXT, VISION, TinyModel, square, tiny_processor

NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")  # runs of newlines that are one token each
LONGEST_RUN = 31  # the longest one of Gemma's tokenizers

TINY_WINDOW = TEXT | dict(layer_types=["sliding_attention", "full_attention"], sliding_window=16)
TINY_3 = TINY_WINDOW | dict(query_pre_attn_scalar=32)
TINY_4 = TINY_WINDOW | dict(
    global_head_dim=64, vocab_size_per_layer_input=512, hidden_size_per_layer_input=16,
    final_logit_softcapping=30.0,
)  # fmt: skip
TOWER_3 = VISION | dict(num_attention_heads=2, image_size=56, patch_size=14, vision_use_head=False)
POOLING_4: dict[str, Any] = dict(patch_size=4, pooling_kernel_size=2)
FEWEST_4 = 70  # tokens of an image, as the image processor allows
TOWER_4 = VISION | POOLING_4 | dict(
    num_attention_heads=2, num_key_value_heads=2, head_dim=32, position_embedding_size=256,
    default_output_length=FEWEST_4,  # read by vLLM
)  # fmt: skip
SIZES_4 = POOLING_4 | {"max_soft_tokens": FEWEST_4}
TOKENS_3 = {
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
}  # fmt: skip
TOKENS_4 = {
    "boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>", "boa_token": "<|audio>",
    "audio_token": "<|audio|>", "eoa_token": "<audio|>",
}  # fmt: skip


class Gemma3(VisionFamily):
    """Gemma 3 (https://arxiv.org/abs/2503.19786), section 2: each image has the same number of tokens."""

    tiny: ClassVar = {
        "gemma3_vl": TinyModel(
            "gemma3",
            TINY_3,
            TOWER_3,
            options={"mm_tokens_per_image": 4},
            special_tokens=tuple(TOKENS_3.values()),
            named_tokens=TOKENS_3,
            token_ids={f"{name}_index": token for name, token in TOKENS_3.items()},
            image="<start_of_image>",
            processor=partial(
                tiny_processor, "Gemma3Processor", image_seq_length=4,
                image_processor=("Gemma3ImageProcessor", {"size": square(TOWER_3["image_size"])}),
            ),
            added_tokens=NEWLINES,
        )
    }  # fmt: skip

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        tokens = processor.tokenizer.encode(processor.full_image_sequence, add_special_tokens=False)
        return MediumShape(tokens, {"features": processor.image_seq_length})

    def expand(self, processor: Any, prompt_ids: list[int], shape: MediaShape) -> list[int]:
        expanded = super().expand(processor, prompt_ids, shape)
        # An image's tokens start and end with newlines, which are one token together with those around them.
        return join_newlines(processor.tokenizer, expanded) if shape.images else expanded

    def block_layers(self, config: Any) -> tuple[str, ...]:
        return FULL, SLIDING

    def image_inputs(self, processor: Any, image: Image.Image) -> dict[str, Tensor]:
        # The processor and vLLM add crops (pan and scan) only if a call asks for them, whatever files say.
        made = processor.image_processor(images=[image], do_pan_and_scan=False, return_tensors="pt")
        return {"pixel_values": made["pixel_values"]}

    def own_arguments(self, config: Any, input_ids: Tensor) -> dict[str, Tensor]:
        return {"token_type_ids": (input_ids == config.image_token_id).long()}

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        size = (1, config.vision_config.num_channels, *[config.vision_config.image_size] * 2)
        pixels = torch.zeros(size) if generator is None else torch.rand(size, generator=generator) * 2 - 1
        image = [config.image_token_id] * config.mm_tokens_per_image
        ids = torch.tensor([config.boi_token_id, *image, config.eoi_token_id])
        return ExampleRow(ids, [Medium("image", {"pixel_values": pixels}, {"features": len(image)})])

    def patches_per_token(self, config: Any, sense: Sense) -> int:
        vision = config.vision_config
        return (vision.image_size // vision.patch_size) ** 2 // config.mm_tokens_per_image

    def frame_factor(self, processor: Any) -> int:
        size = processor.image_processor.size["height"]
        return size // math.isqrt(processor.image_seq_length)

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        encoded = owner.get_image_features(**self.own_inputs(media), return_dict=True)
        return list(encoded.pooler_output.unbind(0))


class Gemma4(VisionFamily):
    """Gemma 4: patches are pooled into tokens; images and frames of videos pass the same tower.

    Facts of a medium: `grid`, frames and patches in height and width, and `features`, tokens of all frames.
    """

    kinds = ("image", "video")
    projector = "model.embed_vision"
    tiny: ClassVar = {
        name: TinyModel(
            "gemma4",
            TINY_4 | text,
            TOWER_4,
            options={"audio_config": None},
            special_tokens=(
                "<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>",
            ),
            named_tokens=TOKENS_4,
            token_ids={
                f"{name}_{'index' if name == 'eoa_token' else 'id'}": TOKENS_4.get(name, "<|video|>")
                for name in (*TOKENS_4, "video_token")
            },
            image="<|image|>",
            video="<|video|>",
            processor=partial(
                tiny_processor, "Gemma4Processor", feature_extractor=("Gemma4AudioFeatureExtractor", {}),
                image_processor=("Gemma4ImageProcessor", SIZES_4), image_seq_length=FEWEST_4,
                video_processor=("Gemma4VideoProcessor", SIZES_4),
            ),
            # Scores are not scaled: with norms of 1 the random model's attention has one key only.
            filled={"q_norm.weight": 0.2, "layer_scalar": 0.9},
        )
        for name, text in (
            (
                "gemma4",
                dict(
                    num_hidden_layers=4, num_kv_shared_layers=2, use_double_wide_mlp=True,
                    layer_types=["sliding_attention", "full_attention"] * 2,
                ),
            ),
            (
                "gemma4_moe",
                dict(
                    hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
                    use_bidirectional_attention="vision", enable_moe_block=True, num_experts=4,
                    top_k_experts=2, moe_intermediate_size=64,
                ),
            ),
        )
    }  # fmt: skip

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        rows, columns, tokens = frame_shape(processor, "image", height, width)
        return MediumShape(tokens, {"grid": [1, rows, columns], "features": len(tokens) - 2})

    def video_shape(
        self, processor: Any, num_frames: int, height: int, width: int, meta: Mapping[str, Any]
    ) -> MediumShape:
        rows, columns, frame = frame_shape(processor, "video", height, width)
        tokens: list[int] = []
        for index in meta["frames_indices"]:
            seconds = int(index / meta["fps"])
            space = " " if tokens else ""
            stamp = f"{space}{seconds // 60:02d}:{seconds % 60:02d} "
            tokens += processor.tokenizer.encode(stamp, add_special_tokens=False) + frame
        features = num_frames * (len(frame) - 2)
        return MediumShape(tokens, {"grid": [num_frames, rows, columns], "features": features})

    def block_layers(self, config: Any) -> tuple[str, ...]:
        return (SLIDING,) if config.get_text_config().use_bidirectional_attention == "vision" else ()

    def image_inputs(self, processor: Any, image: Image.Image) -> dict[str, Tensor]:
        made = processor.image_processor(images=[image], return_tensors="pt")
        return without_padding(made["pixel_values"], made["image_position_ids"])

    def video_inputs(self, processor: Any, frames: np.ndarray, meta: Mapping[str, Any]) -> dict[str, Tensor]:
        made = processed_video(processor, frames, meta)
        return without_padding(made["pixel_values_videos"], made["video_position_ids"])

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        images, videos = ([medium for medium in media if medium.kind == kind] for kind in ("image", "video"))
        inputs: dict[str, Tensor] = {}
        if images:
            inputs["pixel_values"], inputs["image_position_ids"] = padded(images)
        if videos:
            inputs["pixel_values_videos"], inputs["video_position_ids"] = padded(videos)
            inputs["num_frames_per_video"] = torch.tensor([medium.facts["grid"][0] for medium in videos])
        return inputs

    def repair(self, model: Any) -> None:
        # transformers 5.19 drops the number of frames on the way to `get_video_features`, which demands it.
        owner = model.get_submodule(self.media_owner)
        original = type(owner)
        if "num_frames_per_video" not in signature(original.get_video_features).parameters:
            return

        @wraps(original.get_video_features)
        def get_video_features(self: Any, pixel_values_videos: Tensor, *args: Any, **options: Any) -> Any:
            # The forward joins the features of all videos again.
            options.setdefault("num_frames_per_video", torch.tensor([len(pixel_values_videos)]))
            return original.get_video_features(self, pixel_values_videos, *args, **options)

        changed = {"get_video_features": get_video_features, "__module__": original.__module__}
        owner.__class__ = type(original.__name__, (original,), changed)

    def own_arguments(self, config: Any, input_ids: Tensor) -> dict[str, Tensor]:
        types = (input_ids == config.image_token_id).long() + 2 * (input_ids == config.video_token_id).long()
        return {"mm_token_type_ids": types}

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        frames = owner.get_image_features(*padded(media), return_dict=True).pooler_output
        ends = itertools.accumulate(medium.facts["grid"][0] for medium in media)
        bounds = itertools.pairwise([0, *ends])
        return [torch.cat(frames[start:stop]) for start, stop in bounds]

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        frames = facts["grid"][0]
        return [facts["features"] // frames] * frames

    def cut(self, config: Any, medium: Medium, first: int, stop: int) -> Medium:
        frames, rows, columns = medium.facts["grid"]
        features = medium.facts["features"] // frames * (stop - first)
        tensors = {name: value[first:stop] for name, value in medium.tensors.items()}
        facts = {"grid": [stop - first, rows, columns], "features": features}
        return medium._replace(tensors=tensors, facts=facts)

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        vision = config.vision_config
        rows, columns = (1, 1) if generator is None else (2, 3)  # in tokens
        grid = [1, rows * vision.pooling_kernel_size, columns * vision.pooling_kernel_size]
        positions = torch.stack(torch.meshgrid(*map(torch.arange, grid[:0:-1]), indexing="xy"), -1)
        size = (1, math.prod(grid), 3 * vision.patch_size**2)
        pixels = example_pixels(size, generator)
        tokens = [config.image_token_id] * (rows * columns)
        tensors = {"pixel_values": pixels, "position_ids": positions.reshape(1, -1, 2)}
        medium = Medium("image", tensors, {"grid": grid, "features": len(tokens)})
        return ExampleRow(torch.tensor([config.boi_token_id, *tokens, config.eoi_token_id]), [medium])

    def patches_per_token(self, config: Any, sense: Sense) -> int:
        return config.vision_config.pooling_kernel_size**2

    def frame_factor(self, processor: Any) -> int:
        return processor.video_processor.patch_size * processor.video_processor.pooling_kernel_size


def join_newlines(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Replace adjacent tokens that consist of newlines by those of all their newlines together."""
    texts = ["\n" * count for count in range(1, LONGEST_RUN + 1)]
    lengths = {token: count for count, token in enumerate(tokenizer.convert_tokens_to_ids(texts), 1)}
    for missing in (None, tokenizer.unk_token_id):
        lengths.pop(missing, None)
    joined: list[int] = []
    for is_newline, run in itertools.groupby(tokens, lengths.__contains__):
        run = list(run)
        if is_newline and len(run) > 1:
            text = "\n" * sum(lengths[token] for token in run)
            run = tokenizer.encode(text, add_special_tokens=False)
        joined += run
    return joined


def frame_shape(processor: Any, kind: Kind, height: int, width: int) -> tuple[int, int, list[int]]:
    """Return patches in height and width of an image or frame, and its tokens: features between two edges."""
    media_processor = getattr(processor, f"{kind}_processor")
    resize: Callable[..., tuple[int, int]]
    resize = vars(sys.modules[type(media_processor).__module__])["get_aspect_ratio_preserving_size"]
    patch, kernel = media_processor.patch_size, media_processor.pooling_kernel_size
    height, width = resize(
        height, width, patch_size=patch, max_patches=media_processor.max_soft_tokens * kernel**2,
        pooling_kernel_size=kernel,
    )  # fmt: skip
    rows, columns = height // patch, width // patch
    start, end = processor.tokenizer.convert_tokens_to_ids([processor.boi_token, processor.eoi_token])
    features = [getattr(processor, f"{kind}_token_id")] * (rows * columns // kernel**2)
    return rows, columns, [start, *features, end]


def without_padding(pixels: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the patches (frames, patches, values) of one medium and their columns and rows."""
    patches = int((positions[0, :, 0] >= 0).sum())
    return {"pixel_values": pixels[:, :patches].clone(), "position_ids": positions[:, :patches].clone()}


def padded(media: Sequence[Medium]) -> tuple[Tensor, Tensor]:
    """Join patches and positions, and pad them to the most patches of a frame."""
    most = max(medium.tensors["pixel_values"].shape[1] for medium in media)
    parts = [
        {
            name: pad(value, (0, 0, 0, most - value.shape[1]), value=-1 if name == "position_ids" else 0)
            for name, value in medium.tensors.items()
        }
        for medium in media
    ]
    joined = join_tensors(parts)
    return joined["pixel_values"], joined["position_ids"]
