# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V 4.6 and 4.7: large images are seen as a whole and in slices; the language model is Qwen3.5's.

The tokens of an image are `<image_id>0</image_id><image>…</image>`, then rows of `<slice>…</slice>`; a line
break separates rows. A video has these tokens for each frame, and one number for all frames.
"""

import contextlib
import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from verl.models.families.interface import (
    ExampleRow,
    Kind,
    MediaShape,
    Medium,
    MediumShape,
    Sense,
    VisionFamily,
    example_pixels,
)
from verl.models.families.tiny_sizes import HYBRID, TEXT, VISION, TinyModel, mrope, tiny_processor

PATCHES_OF_TOKEN = {"4x": 4, "16x": 16}  # by `downsample_mode`
INPUTS: dict[Kind, tuple[str, str]] = {
    "image": ("pixel_values", "target_sizes"),
    "video": ("pixel_values_videos", "target_sizes_videos"),
}
NAMED_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip
MARKERS = {  # options of a config
    "image_start_id": "<image>", "image_end_id": "</image>", "slice_start_id": "<slice>",
    "slice_end_id": "</slice>", "newline_id": "Ċ",
}  # fmt: skip
TINY_IDS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
TINY_PATCH = 14
# Images of about 4 tokens, and 4 for each of at most 4 slices.
TINY_SIZES = dict(max_slice_nums=4, scale_resolution=8 * TINY_PATCH, patch_size=TINY_PATCH)
TINY_PROCESSORS = {
    f"{kind.lower()}_processor": (f"MiniCPMV4_6{kind}Processor", TINY_SIZES) for kind in ("Image", "Video")
}
TINY_TEXT = TEXT | HYBRID | mrope([3, 3, 2], mrope_interleaved=True, partial_rotary_factor=0.5)


class MiniCPMV46(VisionFamily):
    """MiniCPM-V 4.6 (https://huggingface.co/openbmb/MiniCPM-V-4.6).

    Facts of an image or video: `target_sizes`, height and width in patches of the whole and of its slices,
    frame by frame.
    """

    kinds = ("image", "video")
    projector = "model.merger"
    engine_modules = ("vpm", "vit_merger")
    numbers_videos: ClassVar[bool] = True
    tiny: ClassVar = {
        "minicpmv4_6": TinyModel(
            "minicpmv4_6",
            # The tower's merger starts with weights of deviation 1, and rounding grows with all weights.
            {**TINY_TEXT, "model_type": "qwen3_5_text", "initializer_range": 0.04},
            VISION | dict(patch_size=TINY_PATCH, image_size=8 * TINY_PATCH),
            options={"insert_layer_id": 0},
            special_tokens=tuple(NAMED_TOKENS.values())[2:],
            named_tokens=NAMED_TOKENS,
            token_ids=TINY_IDS,
            image="<|image_pad|>",
            video="<|video_pad|>",
            processor=partial(tiny_processor, "MiniCPMV4_6Processor", **TINY_PROCESSORS),
        )
    }  # fmt: skip

    def image_shape(self, processor: Any, height: int, width: int) -> MediumShape:
        sizes, grid = _sizes_and_grid(processor.image_processor, height, width)
        tokens = _tokens(processor, processor.image_token_id, processor.image_token_divisor, sizes, grid)
        return MediumShape(tokens, {"target_sizes": sizes})

    def video_shape(
        self, processor: Any, num_frames: int, height: int, width: int, meta: Mapping[str, Any]
    ) -> MediumShape:
        if processor.video_processor.stack_frames > 1:
            raise ValueError(
                "the video processor's `stack_frames` must be 1: it joins frames that it samples itself"
            )
        sizes, grid = _sizes_and_grid(processor.video_processor, height, width)
        tokens = _tokens(processor, processor.video_token_id, processor.video_token_divisor, sizes, grid)
        return MediumShape(tokens * num_frames, {"target_sizes": sizes * num_frames})

    def expand(self, processor: Any, prompt_ids: list[int], shape: MediaShape) -> list[int]:
        if processor.default_use_image_id:
            videos = _numbered(processor, shape.videos) if self.numbers_videos else shape.videos
            shape = MediaShape(_numbered(processor, shape.images), videos)
        return super().expand(processor, prompt_ids, shape)

    def video_inputs(self, processor: Any, frames: np.ndarray, meta: Mapping[str, Any]) -> dict[str, Tensor]:
        made = processor.video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
        return {"pixel_values_videos": made["pixel_values_videos"]}

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        for kind, (pixels, sizes) in INPUTS.items():
            chosen = [medium for medium in media if medium.kind == kind]
            if chosen:
                inputs[pixels] = _joined_pixels(chosen)
                inputs[sizes] = _target_sizes(chosen).to(inputs[pixels].device)
        return inputs

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        # As the tower's own forward, with lengths on the CPU; images and frames of videos are the same to it.
        tower, sizes = owner.vision_tower, _target_sizes(media)
        merged = tower.config.insert_layer_id if owner.config.downsample_mode != "4x" else None
        hidden = tower.embeddings(_joined_pixels(media).to(tower.dtype), target_sizes=sizes)
        rows = _rows(sizes)
        for index, block in enumerate(tower.encoder.layers):
            hidden = block(hidden, attention_mask=None, **rows)
            if index == merged:
                with _windows_on_cpu(tower.vit_merger):
                    hidden = tower.vit_merger(hidden, sizes)
                sizes = sizes // 2
                rows = _rows(sizes)
        parts = owner.merger(tower.post_layernorm(hidden), sizes)
        remaining = iter(parts)
        counts = [len(medium.facts["target_sizes"]) for medium in media]
        return [torch.cat(list(itertools.islice(remaining, count))) for count in counts]

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        patches = self.patches_per_token(config, "vision")
        return [height * width // patches for height, width in facts["target_sizes"]]

    def cut(self, config: Any, medium: Medium, first: int, stop: int) -> Medium:
        sizes = medium.facts["target_sizes"]
        name = INPUTS[medium.kind][0]
        pixels = medium.tensors[name]
        columns = pixels.shape[-1] // sum(map(math.prod, sizes))  # of a patch
        start, length = (sum(map(math.prod, part)) * columns for part in (sizes[:first], sizes[first:stop]))
        tensors = {name: pixels.narrow(-1, start, length)}
        return medium._replace(tensors=tensors, facts={"target_sizes": sizes[first:stop]})

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        vision = config.vision_config
        edge = math.isqrt(PATCHES_OF_TOKEN[config.downsample_mode])
        size = [edge, edge] if generator is None else [2 * edge, 3 * edge]  # in patches
        shape = (1, vision.num_channels, vision.patch_size, math.prod(size) * vision.patch_size)
        pixels = example_pixels(shape, generator)
        tokens = torch.tensor([config.image_token_id] * (math.prod(size) // edge**2))
        return ExampleRow(tokens, [Medium("image", {"pixel_values": pixels}, {"target_sizes": [size]})])

    def patches_per_token(self, config: Any, sense: Sense) -> int:
        return PATCHES_OF_TOKEN[config.downsample_mode]

    def smallest_frame(self, processor: Any) -> int:
        return (processor.video_processor.scale_resolution // self.frame_factor(processor)) ** 2

    def engine_options(self, kinds: Container[Kind], videos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {}  # vLLM samples no frames of this model, and passes options of videos to the image processor

    def frame_factor(self, processor: Any) -> int:
        return processor.video_processor.patch_size * math.isqrt(processor.video_token_divisor)


class MiniCPMV47(MiniCPMV46):
    """MiniCPM-V 4.7: the same tower, positions on a canvas, and videos without numbers.

    An image and its slices lie on one canvas of height and width; text continues after its longer side.
    """

    numbers_videos = False
    position_rows = 4
    engine_patches = ("slice_images_as_the_processor_does",)
    tiny: ClassVar = {
        "minicpmv4_7": replace(
            MiniCPMV46.tiny["minicpmv4_6"],
            model_type="minicpmv4_7",
            token_ids=TINY_IDS | MARKERS,
            processor=partial(tiny_processor, "MiniCPMV4_7Processor", **TINY_PROCESSORS),
        )
    }

    def positions(self, config: Any, input_ids: Tensor, shape: MediaShape) -> Tensor:
        from transformers import MiniCPMV4_7Model  # noqa: PLC0415 - older versions have no such model

        model: Any = MiniCPMV4_7Model.__new__(MiniCPMV4_7Model)  # of its config, which is all that is read
        vars(model)["config"] = config
        kinds = (input_ids == config.image_token_id) + 2 * (input_ids == config.video_token_id)
        images, videos = (
            torch.tensor([size for each in shapes for size in each.facts["target_sizes"]])
            for shapes in (shape.images, shape.videos)
        )
        found, _ = model.get_rope_index(input_ids[None], kinds[None], images, videos)  # (3, 1, L)
        return torch.cat([torch.arange(len(input_ids))[None], found[:, 0]])

    def engine_overrides(self, config: Any) -> dict[str, Any]:
        return {"uses_mrope_canvas": True}  # without it vLLM (0.32) counts positions from 0


def _sizes_and_grid(processor: Any, height: int, width: int) -> tuple[list[list[int]], tuple[int, int]]:
    """Return sizes in patches of the whole image and of its slices, and rows and columns of slices."""
    size, resolution, patch = (height, width), processor.scale_resolution, processor.patch_size
    grid = None
    if processor.slice_mode:
        grid = processor.get_sliced_grid(size, processor.max_slice_nums, resolution)
    whole = processor.find_best_resize(size, resolution, patch, allow_upscale=grid is None)
    sizes = [[edge // patch for edge in whole]]
    if grid is None:
        return sizes, (0, 0)
    refined = processor.get_refine_size(size, grid, resolution, patch, allow_upscale=True)
    one = [edge // count // patch for edge, count in zip(refined, grid, strict=True)]
    return sizes + [one] * math.prod(grid), tuple(grid)


def _tokens(
    processor: Any, media_token: int, patches_of_token: int, sizes: list[list[int]], grid: tuple[int, int]
) -> list[int]:
    """Return the tokens of an image or a frame without its number."""
    tokenizer = processor.tokenizer

    def part(name: str, size: list[int]) -> list[int]:
        features = [media_token] * (math.prod(size) // patches_of_token)
        start, end = (getattr(processor, f"{name}_{edge}_token") for edge in ("start", "end"))
        return [tokenizer.convert_tokens_to_ids(start), *features, tokenizer.convert_tokens_to_ids(end)]

    rows, columns = grid
    tokens = part("image", sizes[0])
    for row in range(rows):
        tokens += tokenizer.encode("\n", add_special_tokens=False) if row else []
        tokens += part("slice", sizes[1]) * columns
    return tokens


def _numbered(processor: Any, shapes: Sequence[MediumShape]) -> list[MediumShape]:
    """Put the number of each medium of a prompt before its tokens."""
    start, end = processor.image_id_start_token, processor.image_id_end_token
    encode = partial(processor.tokenizer.encode, add_special_tokens=False)
    return [
        replace(shape, tokens=encode(f"{start}{index}{end}") + shape.tokens)
        for index, shape in enumerate(shapes)
    ]


def _target_sizes(media: Sequence[Medium]) -> Tensor:
    """Return height and width in patches (n, 2) of all parts of media, on the CPU."""
    return torch.tensor(
        [size for medium in media for size in medium.facts["target_sizes"]], dtype=torch.int32
    )


def _joined_pixels(media: Sequence[Medium]) -> Tensor:
    """Return the pixels (1, C, patch, patches x patch) of all parts of media."""
    return torch.cat([medium.tensors[INPUTS[medium.kind][0]] for medium in media], -1)


def _rows(sizes: Tensor) -> dict[str, Any]:
    """Return the inputs of blocks whose rows are the parts of these sizes in patches."""
    patches = sizes.prod(-1)
    cu_seqlens = nn.functional.pad(patches.cumsum(0), (1, 0)).to(torch.int32)
    return {"cu_seqlens": cu_seqlens, "max_seqlen": int(patches.max())}


@contextlib.contextmanager
def _windows_on_cpu(merger: Any) -> Iterator[None]:
    """Keep the lengths of a merger's windows, all of which are equal, on the CPU."""

    def change(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        size = kwargs["max_seqlen"]
        boundaries = torch.arange(0, kwargs["hidden_states"].shape[1] + 1, size, dtype=torch.int32)
        return args, kwargs | {"cu_seqlens": boundaries}

    handle = merger.self_attn.register_forward_pre_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
