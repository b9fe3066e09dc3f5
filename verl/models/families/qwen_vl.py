# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one tower for images and videos, tokens of merged patches, M-RoPE.

Everything that a tower derives from grids is computed on CPU, so that no length is read back from the device.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import vision_utils

from verl.distributed.device import to_device
from verl.models.attention.interface import VISION_ATTENTION
from verl.models.families.interface import (
    EncodedMedium,
    ExampleRow,
    Kind,
    MediaShape,
    Medium,
    MediumShape,
    VisionFamily,
    example_pixels,
    join_tensors,
    processed_video,
)
from verl.models.families.mrope import MropeConstants, frames_of, mrope_positions
from verl.models.families.tiny_sizes import MOE, TEXT, TinyModel, mrope, tiny_processor

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}

TOKEN_IDS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
TINY_TOWER = dict(depth=2, num_heads=4, hidden_size=64, intermediate_size=128, out_hidden_size=128)
TINY_TOWER_3 = TINY_TOWER | dict(patch_size=16, deepstack_visual_indexes=[0], num_position_embeddings=64)


def tiny_parts(patch_size: int, video_processor: str = "Qwen2VLVideoProcessor") -> dict[str, Any]:
    """Return the parts of a processor that read images and videos, for images of 4 to 64 tokens."""
    area = (2 * patch_size) ** 2
    options = dict(patch_size=patch_size, size=dict(shortest_edge=4 * area, longest_edge=64 * area))
    return {
        "image_processor": ("Qwen2VLImageProcessor", options),
        "video_processor": (video_processor, options),
    }


TINY_PROCESSOR_3 = partial(tiny_processor, "Qwen3VLProcessor", **tiny_parts(16, "Qwen3VLVideoProcessor"))


class PatchGridFamily(VisionFamily):
    """Models whose images and videos are grids of patches, several of which are merged into one token.

    A video is one grid, with a step of time for each temporal patch; with `seconds_input` steps follow the
    seconds between patches: time of patch i = floor(i * second_per_grid_ts * tokens_per_second). With
    `splits_videos` each temporal patch is a separate grid, after its time as text.

    Facts of a medium: `grid_thw`, patches in time, height and width; of a video also `second_per_grid_ts`,
    seconds of a temporal patch, and `timestamps`, the time of each in seconds.
    """

    kinds = ("image", "video")
    tower = "model.visual"
    tower_attention = VISION_ATTENTION
    projector = None
    position_rows = 4
    # Options of the config: the tokens before and after an image.
    image_edges: ClassVar[tuple[str, str]] = ("vision_start_token_id", "vision_end_token_id")
    seconds_input: ClassVar[str | None] = None  # of the model's own forward: seconds of temporal patches
    splits_videos: ClassVar[bool] = False
    engine_facts: ClassVar[tuple[str, ...]] = ()  # of videos, in addition to features and grid

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        grid = image_grid(processor.image_processor, height, width)
        features = math.prod(grid) // processor.image_processor.merge_size**2
        return MediumShape([self.token_of(processor, "image")] * features, {"grid_thw": grid})

    def video_shape(
        self, processor: Any, num_frames: int, height: int, width: int, meta: Mapping[str, Any]
    ) -> MediumShape:
        grid = patch_grid(processor.video_processor, num_frames, height, width)
        patch = processor.video_processor.temporal_patch_size
        facts = {
            "grid_thw": grid,
            "second_per_grid_ts": patch / sampled_fps(meta),
            "timestamps": self.timestamps(meta, patch),
        }
        return MediumShape(self.video_tokens(processor, facts), facts)

    def timestamps(self, meta: Mapping[str, Any], temporal_patch_size: int) -> list[float]:
        """Return the time of each temporal patch in seconds: the middle between its first and last frame."""
        times = frame_times(meta, temporal_patch_size)
        last = temporal_patch_size - 1
        return [(times[i] + times[i + last]) / 2 for i in range(0, len(times), temporal_patch_size)]

    def video_tokens(self, processor: Any, facts: Mapping[str, Any]) -> list[int]:
        features = math.prod(facts["grid_thw"]) // processor.video_processor.merge_size**2
        return [self.token_of(processor, "video")] * features

    def video_inputs(self, processor: Any, frames: np.ndarray, meta: Mapping[str, Any]) -> dict[str, Tensor]:
        made = processed_video(processor, frames, meta)
        return {"pixel_values_videos": made["pixel_values_videos"]}

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        inputs = join_tensors([medium.tensors for medium in media])
        device = next(iter(inputs.values())).device
        for kind in PIXELS:
            grids = [medium.facts["grid_thw"] for medium in media if medium.kind == kind]
            if grids:
                inputs[f"{kind}_grid_thw"] = torch.tensor(grids, device=device)
        seconds = [medium.facts["second_per_grid_ts"] for medium in media if medium.kind == "video"]
        if self.seconds_input and seconds:
            inputs[self.seconds_input] = torch.tensor(seconds, device=device)
        return inputs

    def constants(self, config: Any) -> MropeConstants:
        """Return what positions depend on in a model's config."""
        return MropeConstants(
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            spatial_merge_size=config.vision_config.spatial_merge_size,
            tokens_per_second=getattr(config.vision_config, "tokens_per_second", 1.0),
            audio_token_id=getattr(config, "audio_token_id", None),
        )

    def positions(self, config: Any, input_ids: Tensor, shape: MediaShape) -> Tensor:
        constants, facts = self.constants(config), [video.facts for video in shape.videos]
        images, videos = grids_of(shape.images), grids_of(shape.videos)
        if self.splits_videos:
            return mrope_positions(input_ids, constants, images, frames_of(videos))
        factors = None
        if self.seconds_input:
            factors = [time_factor(each["second_per_grid_ts"], constants.tokens_per_second) for each in facts]
        turns = [each.get("turns") for each in facts]  # of videos with sound
        return mrope_positions(input_ids, constants, images, videos, factors, turns)

    def engine_features(self, kind: Kind, media: Sequence[EncodedMedium]) -> dict[str, Any]:
        data: dict[str, Any] = {
            f"{kind}_embeds": torch.cat([medium.features for medium in media]),
            f"{kind}_grid_thw": torch.tensor([medium.facts["grid_thw"] for medium in media]),
        }
        for name in self.engine_facts if kind == "video" else ():
            values = [medium.facts[name] for medium in media]
            data[name] = values if isinstance(values[0], list) else torch.tensor(values)
        return data

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        pixels = torch.cat([medium.tensors[PIXELS[medium.kind]] for medium in media])
        grids = torch.tensor([medium.facts["grid_thw"] for medium in media])
        inputs = tower_inputs(owner.visual, grids, pixels.device)
        encoded = owner.get_image_features(pixels, grids, return_dict=True, **inputs)
        levels = getattr(encoded, "deepstack_features", None)  # Qwen3-VL only
        if levels is None:
            return list(encoded.pooler_output)
        # transformers 5.17 splits the features of media, but not those of the levels
        sizes = [len(part) for part in encoded.pooler_output]
        levels = [level.split(sizes) if torch.is_tensor(level) else level for level in levels]
        return [torch.cat(parts, -1) for parts in zip(encoded.pooler_output, *levels, strict=True)]

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        time, height, width = facts["grid_thw"]
        return [height * width // config.vision_config.spatial_merge_size**2] * time

    def cut(self, config: Any, medium: Medium, first: int, stop: int) -> Medium:
        time, height, width = medium.facts["grid_thw"]
        if (first, stop) == (0, time):
            return medium
        size = height * width
        tensors = {name: pixels[first * size : stop * size] for name, pixels in medium.tensors.items()}
        return medium._replace(tensors=tensors, facts={"grid_thw": [stop - first, height, width]})

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        vision = config.vision_config
        merge = vision.spatial_merge_size
        rows, columns = (1, 1) if generator is None else (2, 3)  # in tokens
        values = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
        size = (rows * columns * merge * merge, values)
        pixels = example_pixels(size, generator)
        before, after = (getattr(config, name) for name in self.image_edges)
        ids = torch.tensor([before, *[config.image_token_id] * (rows * columns), after])
        facts = {"grid_thw": [1, rows * merge, columns * merge]}
        return ExampleRow(ids, [Medium("image", {"pixel_values": pixels}, facts)])

    def frame_factor(self, processor: Any) -> int:
        return processor.video_processor.patch_size * processor.video_processor.merge_size

    def smallest_frame(self, processor: Any) -> int:
        # The processor enlarges frames with fewer pixels than its lower limit. A frame that fits a budget has
        # more than a quarter of it, as both sides are rounded down to merged patches; an enlarged frame has
        # less than 2 limit + 2 merged patches, as both sides are rounded up.
        return -(-4 * processor.video_processor.size["shortest_edge"] // self.frame_factor(processor) ** 2)

    def resized_image(self, processor: Any, height: int, width: int) -> tuple[int, int]:
        _, rows, columns = image_grid(processor.image_processor, height, width)
        patch = processor.image_processor.patch_size
        return rows * patch, columns * patch


class QwenVL(PatchGridFamily):
    """Qwen2-VL (https://arxiv.org/abs/2409.12191), section 2.1."""

    takes_features = True
    tiny: ClassVar = {
        "qwen2_vl": TinyModel(
            "qwen2_vl",
            TEXT | mrope([4, 6, 6]),
            dict(
                depth=2,
                num_heads=4,
                embed_dim=64,
                hidden_size=128,
                mlp_ratio=2,
                patch_size=14,
                in_chans=3,  # as published files name it, and SGLang reads it
            ),
            token_ids=TOKEN_IDS,
            processor=partial(tiny_processor, "Qwen2VLProcessor", **tiny_parts(14)),
        )
    }


class Qwen25VL(PatchGridFamily):
    """Qwen2.5-VL (https://arxiv.org/abs/2502.13923), section 2.1.3: time in steps of `tokens_per_second`."""

    takes_features = True
    seconds_input = "second_per_grid_ts"
    engine_facts = ("second_per_grid_ts",)
    tiny: ClassVar = {
        "qwen2_5_vl": TinyModel(
            "qwen2_5_vl",
            TEXT | mrope([4, 6, 6]),
            TINY_TOWER | dict(window_size=56, fullatt_block_indexes=[1], patch_size=14),
            token_ids=TOKEN_IDS,
            processor=partial(tiny_processor, "Qwen2_5_VLProcessor", **tiny_parts(14)),
        )
    }


class Qwen3VL(PatchGridFamily):
    """Qwen3-VL, dense and with experts."""

    takes_features = True
    splits_videos = True
    engine_facts = ("timestamps",)
    transposed_experts: ClassVar = {"qwen3_vl_moe": ("experts.gate_up_proj", "experts.down_proj")}
    tiny: ClassVar = {
        name: TinyModel(
            name,
            TEXT | experts | mrope([6, 5, 5], mrope_interleaved=True),
            TINY_TOWER_3,
            token_ids=TOKEN_IDS,
            processor=TINY_PROCESSOR_3,
        )
        for name, experts in (("qwen3_vl", {}), ("qwen3_vl_moe", MOE))
    }

    def video_tokens(self, processor: Any, facts: Mapping[str, Any]) -> list[int]:
        _, height, width = facts["grid_thw"]
        frame = [processor.video_token_id] * (height * width // processor.video_processor.merge_size**2)
        tokens: list[int] = []
        for stamp in facts["timestamps"]:
            tokens += processor.tokenizer.encode(f"<{stamp:.1f} seconds>", add_special_tokens=False)
            tokens += [processor.vision_start_token_id, *frame, processor.vision_end_token_id]
        return tokens


def time_factor(seconds: float, per_second: float) -> float:
    """Return the steps in time between two temporal patches, given the seconds between them, as in vLLM."""
    return float(np.float32(seconds)) * per_second


def grids_of(shapes: Sequence[MediumShape]) -> list[tuple[int, int, int]]:
    return [tuple(shape.facts["grid_thw"]) for shape in shapes]


def image_grid(image_processor: Any, height: int, width: int) -> list[int]:
    """Return patches in time, height and width after the processor's own resizing."""
    # In GLM-4.xV an image counts as the frames of a temporal patch.
    return patch_grid(image_processor, image_processor.temporal_patch_size, height, width)


def patch_grid(media_processor: Any, num_frames: int, height: int, width: int) -> list[int]:
    """Like `image_grid`, for a video."""
    resize = vars(sys.modules[type(media_processor).__module__])["smart_resize"]
    patch, temporal = media_processor.patch_size, media_processor.temporal_patch_size
    factor = patch * media_processor.merge_size
    smallest, largest = media_processor.size["shortest_edge"], media_processor.size["longest_edge"]
    # In Qwen3-VL the limits apply to the whole video.
    counts_frames = "num_frames" in signature(resize).parameters
    if getattr(media_processor, "cap_pixels_per_frame", None):
        budget = media_processor.max_video_tokens * factor * factor
        if counts_frames:
            largest = max(min(budget, largest // num_frames), int(smallest * 1.05)) * num_frames
        else:
            largest = max(min(largest, int(budget * 0.9) * temporal // num_frames), int(smallest * 1.05))
    frames = {"num_frames": num_frames, "temporal_factor": temporal} if counts_frames else {}
    height, width = resize(
        height=height, width=width, factor=factor, min_pixels=smallest, max_pixels=largest, **frames
    )
    return [-(-num_frames // temporal), height // patch, width // patch]


def sampled_fps(meta: Mapping[str, Any]) -> float:
    return len(meta["frames_indices"]) / meta["total_num_frames"] * meta["fps"]


def frame_times(meta: Mapping[str, Any], temporal_patch_size: int) -> list[float]:
    """Return the times of sampled frames in seconds; the last one repeats to fill a temporal patch."""
    indices = list(meta["frames_indices"])
    return [index / meta["fps"] for index in indices + indices[-1:] * (-len(indices) % temporal_patch_size)]


def tower_inputs(tower: Any, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Compute on CPU what a tower derives from its grids, by the keywords of `get_image_features`."""
    merge = tower.spatial_merge_size
    on_cpu = {"image_cu_seqlens": vision_utils.get_vision_cu_seqlens(grids)}
    on_device = {"image_position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    if hasattr(tower, "window_size"):
        index, bounds = vision_utils.get_vision_window_index(
            grids, merge, tower.window_size, tower.patch_size
        )
        on_device["image_window_index"], on_cpu["image_cu_window_seqlens"] = index, bounds
    if hasattr(tower, "interpolation_mode"):
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
        on_device |= {"image_interp_indices": indices, "image_interp_weights": weights}
    return on_cpu | to_device(on_device, device)
