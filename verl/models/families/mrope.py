# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of prompts with images and videos (M-RoPE), equal to vLLM's.

Text has the same position in time, height and width; an image or video has a grid of positions, and the next
token continues after the largest one so far. transformers (5.19) continues differently after a video, which
shifts all later tokens relative to the rollout engine; so positions are computed here and passed to the
model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_AXES = 4  # text, time, height, width: the rows that transformers' models take

Grid = tuple[int, int, int]  # patches in time, height and width, before merging


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


def mrope_positions(
    input_ids: Tensor,  # (L,) one prompt with expanded media tokens, without padding
    constants: MropeConstants,
    images: Sequence[Grid] = (),
    videos: Sequence[Grid] = (),
    time_factors: Sequence[float] | None = None,  # time steps of a temporal patch of each video; None is one
) -> Tensor:
    """Return positions (4, L) int64: text, time, height and width; a video is one grid.

    Source: Qwen2-VL, section 2.1 (https://arxiv.org/abs/2409.12191).

    Raises:
        ValueError: The tokens do not fit the grids.
    """
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


def frames_of(videos: Iterable[Grid]) -> list[Grid]:
    """Return the grid of each temporal patch of the videos, for models that put text between them."""
    return [(1, height, width) for time, height, width in videos for _ in range(time)]


def continue_positions(last: Tensor, length: int) -> Tensor:
    """Return positions (..., length) of responses that continue the prompts' last positions (...)."""
    return last.unsqueeze(-1) + torch.arange(1, length + 1, device=last.device)


def _text(length: int, position: int) -> np.ndarray:
    return np.broadcast_to(np.arange(length) + position, (3, length))


def _grid(grid: Grid, merge: int) -> np.ndarray:
    time, height, width = grid
    return np.indices((time, height // merge, width // merge)).reshape(3, -1)
