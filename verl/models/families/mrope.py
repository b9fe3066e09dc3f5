# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of prompts with images and videos (M-RoPE), equal to vLLM's.

Text has the same position in time, height and width; an image or video has a grid of positions, and the next
token continues after the largest one so far. transformers (5.19) continues differently after a video, which
shifts all later tokens relative to the rollout engine; so positions are computed here and passed to the
model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Grid = tuple[int, int, int]  # patches in time, height and width, before merging
# Whose tokens follow each other in a video with sound: kind, and number of temporal patches or audio tokens.
Turns = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class MropeConstants:
    """Constants of the model's config that determine positions."""

    image_token_id: int
    video_token_id: int
    spatial_merge_size: int = 2
    tokens_per_second: float = 1.0
    audio_token_id: int | None = None
    # Tokens that open the sound of a video, and close it, which share positions with those around them.
    shared_edges: int = 0


def mrope_positions(
    input_ids: Tensor,  # (L,) one prompt with expanded media tokens, without padding
    constants: MropeConstants,
    images: Sequence[Grid] = (),
    videos: Sequence[Grid] = (),
    time_factors: Sequence[float] | None = None,  # time steps of a temporal patch of each video; None is one
    turns: Sequence[Turns | None] | None = None,  # of each video; None for one without sound
) -> Tensor:
    """Return positions (4, L) int64: text, time, height and width; a video is one grid.

    In a video with sound, audio tokens have positions like text, from the video's first one on. In some
    models the tokens that open and close the sound share positions with those around them, which open and
    close the video. The text continues after the last turn.

    Sources: Qwen2-VL, section 2.1 (https://arxiv.org/abs/2409.12191); Qwen2.5-Omni, section 2.2
    (https://arxiv.org/abs/2503.20215), Qwen3-Omni, section 2.3 (https://arxiv.org/abs/2509.17765), and
    `get_rope_index` of their models in transformers.

    Raises:
        ValueError: The tokens do not fit the grids.
    """
    tokens = torch.as_tensor(input_ids).tolist()
    grids = {constants.image_token_id: iter(images), constants.video_token_id: iter(videos)}
    factors = iter(time_factors or [1.0] * len(videos))
    sounds = iter(turns or [None] * len(videos))
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
        block, sound = _grid(grid, constants.spatial_merge_size), None
        if token == constants.video_token_id:
            block[0] = (block[0] * next(factors)).astype(np.int64)
            sound = next(sounds)
        runs = [(token, block)] if sound is None else _with_sound(block, grid[0], sound, constants)
        expected = [each for each, run in runs for _ in range(run.shape[1])]
        size = len(expected)
        if tokens[at : at + size] != expected:
            raise ValueError(f"the image or video at token {at} needs {size} media tokens")
        # positions before the video and after it, of two tokens each
        shared = 0 if sound is None else constants.shared_edges
        first = position + at - start - shared  # of the image or video
        parts.append(np.minimum(_text(at - start, position), first - 1))
        parts += [run + first for _, run in runs]
        position = int(parts[-1].max()) + 1
        parts.append(_text(shared, position))
        at = start = at + size + shared
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


def _with_sound(
    block: np.ndarray, num_patches: int, turns: Turns, constants: MropeConstants
) -> list[tuple[int | None, np.ndarray]]:
    """Return token and positions (3, n) of each turn, from those of a video (3, N)."""
    patches = iter(np.split(block, num_patches, axis=1))
    runs: list[tuple[int | None, np.ndarray]] = []
    heard = 0
    for kind, count in turns:
        if kind == "audio":
            runs.append((constants.audio_token_id, _text(count, heard)))
            heard += count
        else:
            seen = np.concatenate([next(patches) for _ in range(count)], axis=1)
            runs.append((constants.video_token_id, seen))
    return runs


def _grid(grid: Grid, merge: int) -> np.ndarray:
    time, height, width = grid
    return np.indices((time, height // merge, width // merge)).reshape(3, -1)
