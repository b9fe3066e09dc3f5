# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of prompts with images and videos (M-RoPE), equal to vLLM's.

Text has the same position in time, height and width; an image or video has a grid of positions, and the next
token continues after the largest one so far. transformers (5.19) continues differently after a video, which
shifts all later tokens relative to the rollout engine; so positions are computed here and passed to the
model.

To support a model, add an entry to `POSITION_IDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_AXES = 4  # text, time, height, width: the rows that transformers' Qwen models take


@dataclass(frozen=True)
class MropeConstants:
    """Constants of the model's config that determine positions."""

    image_token_id: int
    video_token_id: int
    spatial_merge_size: int = 2
    tokens_per_second: float = 1.0

    @classmethod
    def from_config(cls, config: Any) -> "MropeConstants":
        return cls(
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            spatial_merge_size=config.vision_config.spatial_merge_size,
            tokens_per_second=getattr(config.vision_config, "tokens_per_second", 1.0),
        )


PositionIds = Callable[..., Tensor]


def qwen2_vl(
    input_ids: Tensor,  # (L,) one prompt with expanded media tokens, without padding
    constants: MropeConstants,
    image_grid_thw: Tensor | None = None,  # (images, 3) patches before merging
    video_grid_thw: Tensor | None = None,  # (videos, 3) patches before merging
    second_per_grid_ts: Tensor | None = None,  # (videos,) seconds of a temporal patch; None counts patches
) -> Tensor:  # (4, L) int64: text, time, height, width
    """Return positions (4, L) of Qwen2-VL: a video is one grid with a time step for each temporal patch.

    Source: Qwen2-VL, section 2.1 (https://arxiv.org/abs/2409.12191).
    """
    return _positions(input_ids, constants, _blocks(image_grid_thw), _blocks(video_grid_thw))


def qwen2_5_vl(
    input_ids: Tensor,
    constants: MropeConstants,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
) -> Tensor:
    """Return positions of Qwen2.5-VL: as Qwen2-VL, with time in steps of `tokens_per_second`.

        time of temporal patch i = floor(i * second_per_grid_ts * tokens_per_second)

    Source: Qwen2.5-VL, section 2.1.3 (https://arxiv.org/abs/2502.13923).
    """
    videos = _blocks(video_grid_thw)
    seconds = [1.0] * len(videos)
    if second_per_grid_ts is not None:
        seconds = torch.as_tensor(second_per_grid_ts, dtype=torch.float32).tolist()
    factors = [value * constants.tokens_per_second for value in seconds]
    return _positions(input_ids, constants, _blocks(image_grid_thw), videos, factors)


def qwen3_vl(
    input_ids: Tensor,
    constants: MropeConstants,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
) -> Tensor:
    """Return positions of Qwen3-VL: each temporal patch is a grid between timestamps in the text."""
    frames = [(1, height, width) for time, height, width in _blocks(video_grid_thw) for _ in range(time)]
    return _positions(input_ids, constants, _blocks(image_grid_thw), frames)


POSITION_IDS: dict[str, PositionIds] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
}


def position_ids_for(model_type: str) -> PositionIds | None:
    """Return the model's position function; None if its positions are 0, 1, 2, ..."""
    return POSITION_IDS.get(model_type)


def continue_positions(last: Tensor, length: int) -> Tensor:
    """Return positions (..., length) of responses that continue the prompts' last positions (...)."""
    return last.unsqueeze(-1) + torch.arange(1, length + 1, device=last.device)


def _blocks(grids: Tensor | None) -> list[tuple[int, int, int]]:
    return [] if grids is None else [tuple(grid) for grid in torch.as_tensor(grids).reshape(-1, 3).tolist()]


def _positions(
    input_ids: Tensor,
    constants: MropeConstants,
    images: list[tuple[int, int, int]],
    videos: list[tuple[int, int, int]],
    time_factors: list[float] | None = None,  # time steps of a temporal patch of each video; None is one
) -> Tensor:
    """Concatenate the positions of text and grids, in the order of their tokens."""
    tokens = torch.as_tensor(input_ids).tolist()
    grids = {constants.image_token_id: iter(images), constants.video_token_id: iter(videos)}
    factors = iter(time_factors or [1.0] * len(videos))
    parts: list[np.ndarray] = []  # of (3, tokens)
    start, position = 0, 0  # first token of the pending text; its position
    at = 0
    while at < len(tokens):
        if tokens[at] not in grids:
            at += 1
            continue
        token, grid = tokens[at], next(grids[tokens[at]], None)
        if grid is None:
            raise ValueError(f"media token {at} belongs to no image or video")
        parts.append(_text(at - start, position))
        block = _grid(grid, constants.spatial_merge_size)
        size = block.shape[1]
        if tokens[at : at + size] != [token] * size:
            raise ValueError(f"the image or video at token {at} needs {size} media tokens")
        if token == constants.video_token_id:
            block[0] = (block[0] * next(factors)).astype(np.int64)
        parts.append(block + position + at - start)
        position = int(parts[-1].max()) + 1
        at = start = at + size
    parts.append(_text(len(tokens) - start, position))
    if any(next(rest, None) for rest in grids.values()):
        raise ValueError("there are images or videos without media tokens")
    positions = np.concatenate(parts, axis=1)  # (3, L)
    return torch.cat([torch.arange(len(tokens)).unsqueeze(0), torch.from_numpy(positions)])  # (4, L)


def _text(length: int, position: int) -> np.ndarray:
    return np.broadcast_to(np.arange(length) + position, (3, length))


def _grid(grid: tuple[int, int, int], merge: int) -> np.ndarray:
    time, height, width = grid
    return np.indices((time, height // merge, width // merge)).reshape(3, -1)
