# SPDX-License-Identifier: Apache-2.0
"""Records the pictures and videos of a diffusion run, with the steps of sampling as tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.trainer.rollouts.rollout_log import RolloutLog, spread
from verl.viewer.pictures import FPS


class PictureLog(RolloutLog):
    """A rollout log of pictures (3, H, W) and videos (F, 3, H, W).

    Reads `pixels` in addition, and its tokens are the numbers of steps.
    """

    def __init__(self, run_folder: Path, num_groups: int) -> None:
        super().__init__(run_folder, num_groups, None, None, skip_special_tokens=True)

    def keep_picture(self, pixels: np.ndarray) -> dict[str, Any]:
        """Save one once, a video also as frames; return its columns of the rollout store."""
        is_video = pixels.ndim == 4
        frames = pixels if is_video else pixels[None]
        chosen = spread(len(frames))
        names = [self.store.add_picture(frames[number]) for number in chosen]
        is_lost = None in names
        picture = {
            "kind": "video" if is_video else "image",
            "source": _size(pixels),
            "files": [name for name in names if name is not None],
            "problem": "the disk is full" if is_lost else None,
            "times": [number / FPS for number in chosen] if is_video and not is_lost else None,
            "whole": self.store.add_video(pixels) if is_video else None,
        }
        return {"picture": picture, "picture_start": self.store.add_thumbnail(frames[0])}

    def save_picture(self, pixels: np.ndarray) -> str:
        """Save one once and return a line for people: `picture of 16 x 16 pixels, FILE`."""
        add = self.store.add_video if pixels.ndim == 4 else self.store.add_picture
        name = add(pixels)
        return described(pixels) if name is None else f"{described(pixels)}, {self.store.path(name)}"

    def _response(self, item: Mapping[str, Any], token_ids: list[int]) -> dict[str, Any]:
        return {"response": described(item["pixels"]), **self.keep_picture(item["pixels"])}

    def _token_texts(self, token_ids: np.ndarray) -> dict[int, str]:
        return {number: f"step {number} " for number in np.unique(token_ids).tolist()}


def described(pixels: np.ndarray) -> str:
    """Return `picture of 16 x 16 pixels`, width first, or `video of 9 frames of 16 x 16 pixels`."""
    return f"{'video' if pixels.ndim == 4 else 'picture'} of {_size(pixels)}"


def _size(pixels: np.ndarray) -> str:
    size = f"{pixels.shape[-1]} x {pixels.shape[-2]} pixels"
    return f"{len(pixels)} frames of {size}" if pixels.ndim == 4 else size
