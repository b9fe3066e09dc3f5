# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V, GLM-4.5V and GLM-4.6V (https://arxiv.org/abs/2507.01006): grids of merged patches, M-RoPE.

Images and videos share the token `<|image|>`. A video is a sequence of images between the tokens of its
begin and end, one for each temporal patch, with the time of its first frame as text after it::

    <|begin_of_video|><|begin_of_image|><|image|>...<|end_of_image|>0<|begin_of_image|>...<|end_of_video|>

The tower sees frames only: the positions of a frame's patches are interpolated to the frame's own size.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from verl.models.families.interface import Kind, MediaShape, Medium
from verl.models.families.mrope import frames_of
from verl.models.families.qwen_vl import PIXELS, TINY_TOWER, PatchGridFamily, frame_times
from verl.models.families.tiny_sizes import TEXT, TinyModel, mrope, tiny_processor

IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
VIDEO = "<|begin_of_video|><|video|><|end_of_video|>"
EDGES = {
    f"{kind}_{config_name}_token_id": f"<|{name}_of_{kind}|>"
    for kind in PIXELS
    for config_name, name in (("start", "begin"), ("end", "end"))
}
TOKEN_IDS = {"image_token_id": "<|image|>", "video_token_id": "<|video|>"} | EDGES
# Half of each head is rotated: 8 pairs of dimensions. Attention has biases, which vLLM reads from the config.
TINY_TEXT = (
    TEXT | mrope([2, 3, 3], partial_rotary_factor=0.5) | dict(attention_bias=True, tie_word_embeddings=False)
)
TINY_MOE = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1,
    first_k_dense_replace=1, norm_topk_prob=True, use_qk_norm=False,  # which vLLM reads
)  # fmt: skip
# Images of 4 to 64 tokens; pixels of both frames of a temporal patch count, for images too.
TINY_LIMITS = {"size": dict(shortest_edge=2 * 4 * 28**2, longest_edge=2 * 64 * 28**2)}


def _tiny(model_type: str, processor: str, **text: Any) -> TinyModel:
    return TinyModel(
        model_type,
        TINY_TEXT | text,
        TINY_TOWER | dict(patch_size=14, image_size=112),
        special_tokens=tuple(TOKEN_IDS.values()),
        token_ids=TOKEN_IDS,
        image=IMAGE,
        video=VIDEO,
        processor=partial(
            tiny_processor, f"{processor}Processor",
            image_processor=(f"{processor}ImageProcessor", TINY_LIMITS),
            video_processor=(f"{processor}VideoProcessor", TINY_LIMITS),
        ),
    )  # fmt: skip


class GlmV(PatchGridFamily):
    """GLM-4.1V, 4.5V and 4.6V; checkpoints of 4.6V have the types of the former and another processor."""

    engine_patches = ("keep_times_of_frames", "take_several_videos")
    image_edges = ("image_start_token_id", "image_end_token_id")
    splits_videos = True
    tiny: ClassVar = {
        "glm4v": _tiny("glm4v", "Glm4v"),
        "glm4v_moe": _tiny("glm4v_moe", "Glm4v", **TINY_MOE),
        "glm46v": _tiny("glm46v", "Glm46V"),
    }

    def timestamps(self, meta: Mapping[str, Any], temporal_patch_size: int) -> list[float]:
        """Return the time of the first frame of each temporal patch in seconds."""
        return frame_times(meta, temporal_patch_size)[::temporal_patch_size]

    def video_tokens(self, processor: Any, facts: Mapping[str, Any]) -> list[int]:
        _, height, width = facts["grid_thw"]
        frame = [processor.image_token_id] * (height * width // processor.video_processor.merge_size**2)
        tokens: list[int] = []
        for stamp in facts["timestamps"]:
            # The processor's own text of a frame: whole seconds, or in GLM-4.6V tenths.
            text = processor.replace_frame_token_id(stamp, num_image_tokens=0)
            begin, *rest = processor.tokenizer.encode(text, add_special_tokens=False)
            tokens += [begin, *frame, *rest]
        return tokens

    def media_tokens(self, config: Any, input_ids: Tensor) -> dict[Kind, Tensor]:
        is_media = input_ids == config.image_token_id
        is_video = is_media & _in_videos(config, input_ids)
        return {"image": (is_media & ~is_video).nonzero()[:, 0], "video": is_video.nonzero()[:, 0]}

    def positions(self, config: Any, input_ids: Tensor, shape: MediaShape) -> Tensor:
        # transformers and vLLM agree: each temporal patch is a grid with t = 1, after which both continue.
        tokens = torch.as_tensor(input_ids).clone()
        tokens[self.media_tokens(config, tokens)["video"]] = config.video_token_id
        return super().positions(config, tokens, shape)

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        # The model's own forward puts images and videos at the same tokens, so it takes either, not both;
        # the frames of a video are images to its tower.
        pixels = torch.cat([medium.tensors[PIXELS[medium.kind]] for medium in media])
        grids = frames_of(medium.facts["grid_thw"] for medium in media)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids, device=pixels.device)}

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        counts = [medium.facts["grid_thw"][0] for medium in media]
        frames = [
            self.cut(owner.config, medium, first, first + 1)
            for medium, count in zip(media, counts, strict=True)
            for first in range(count)
        ]
        with owner.visual.embeddings.register_forward_pre_hook(_with_sizes_on_device):
            features = iter(super().encode(owner, frames))
        return [torch.cat(list(islice(features, count))) for count in counts]


def _in_videos(config: Any, input_ids: Tensor) -> Tensor:
    """Return for each packed token (N,) whether it is inside a video.

    A policy may sample the tokens of a video's begin and end; a video begins only where an image follows.
    """
    start, end, image = config.video_start_token_id, config.video_end_token_id, config.image_start_token_id
    following = torch.cat([input_ids[1:], input_ids[-1:]])
    numbers = torch.arange(1, len(input_ids) + 1, device=input_ids.device)
    begins = numbers * ((input_ids == start) & (following == image))
    ends = numbers * (input_ids == end)
    return begins.cummax(0).values > ends.cummax(0).values


def _with_sizes_on_device(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move the lengths and sizes of frames to the patches' device, where the tower interpolates positions."""
    patches, lengths, sizes, *coordinates = arguments
    return (patches, lengths.to(patches.device), sizes.to(patches.device), *coordinates)
