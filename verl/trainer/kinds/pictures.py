# SPDX-License-Identifier: Apache-2.0
"""Runs of a policy for pictures or videos (`trainer.diffusion`).

Steps of sampling are tokens, pictures are responses: schedules, filters, scores, advantages, losses, metrics
and checkpoints are those of text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config.rollout import RolloutConfig
from verl.config.worker import WorkerConfig
from verl.data.media.cache import MediaCache
from verl.data.media.sizes import MediaOptions
from verl.data.readers import Readers, load_readers
from verl.diffusion.engine import FinishedPicture
from verl.diffusion.families.registry import downloaded, family_of
from verl.diffusion.sampler import size_of, trained_steps
from verl.diffusion.worker import DiffusionWorker
from verl.logger.tracker import Tracker
from verl.protocol import DataProto, objects
from verl.trainer.kinds.text import TextRun
from verl.trainer.model_checks import export_checkpoints
from verl.trainer.reward_samples import Response, SampledRows
from verl.trainer.rollouts.engines import Engines
from verl.trainer.rollouts.rollout_log import RolloutLog, spread
from verl.trainer.rollouts.sampler import SAMPLED_FROM, OnScored, Sampler
from verl.trainer.rollouts.scores import Scoring
from verl.viewer.pictures import FPS

SHADES = {"black": 0.0, "gray": 0.5, "white": 1.0}  # of blank pictures


class PictureRun(TextRun):
    """Builds the parts of a trainer for pictures and videos."""

    worker_class = DiffusionWorker

    def readers(self, media: MediaOptions, cache: MediaCache) -> Readers:
        model = self.worker.actor.model
        export_checkpoints([model])
        family_of(downloaded(model))
        return load_readers(model, self.data.override_chat_template, media, cache)

    def rollout_log(self, readers: Readers) -> RolloutLog:
        return PictureLog(Path(self.trainer.checkpoint_folder), self.trainer.rollouts_to_keep)

    def sampler(
        self, engines: Engines, reward: Any, readers: Readers, tracker: Tracker, rollout_log: RolloutLog,
        on_scored: OnScored | None = None,
    ) -> Sampler:  # fmt: skip
        assert isinstance(rollout_log, PictureLog), "that of pictures"
        on_progress = None if self.worker.rollout.disable_tqdm else tracker.progress
        steps = replace(self.data, max_response_length=self.worker.rollout.num_steps)
        arguments = steps, self.worker, engines, reward, readers.tokenizer, on_progress, on_scored
        return PictureSampler(rollout_log, self.worker.rollout, *arguments)


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


class PictureSampler(Sampler):
    """Samples pictures: the reward function sees them, training their latents, people what the log saves."""

    shown_columns = ("pixels",)

    def __init__(self, log: PictureLog, rollout: RolloutConfig, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log, self.rollout = log, rollout
        self.columns = [*SAMPLED_FROM, "prompt_text"]
        self.validation_options = self.validation_options.override({"temperature": 0.0})  # without noise

    def shown_response(self, sequences: DataProto, row: int) -> str:
        return self.log.save_picture(sequences.non_tensor_batch["pixels"][row])

    def _inputs(self, response: Any, columns: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(response, FinishedPicture) and response.pixels is not None, "the engine makes them"
        return columns | picture_columns(torch.tensor(response.pixels).float() / 255)

    def _join(
        self, prompts: DataProto, responses: Sequence[Any], job: Any, max_tokens: int
    ) -> tuple[DataProto, Scoring]:
        sequences, scoring = super()._join(prompts, list(responses), job, max_tokens)
        pixels = {"pixels": objects([response.pixels for response in responses])}
        if responses[0].latents is None:  # of a validation
            return sequences.merge(pixels), scoring
        mask = torch.zeros_like(sequences.batch["loss_mask"])  # (B, S)
        for row, response in enumerate(responses):
            mask[row, trained_steps(self.rollout, f"{response.uid} {response.sample}")] = 1
        added = pixels | {
            "latents": torch.stack([response.latents for response in responses]),
            "loss_mask": sequences.batch["loss_mask"] * mask,
        }
        if responses[0].kl is not None:
            added["full_kl"] = torch.tensor([response.kl for response in responses])
        return sequences.merge(added, replace=["loss_mask"]), scoring

    def _width(self, responses: Sequence[Any], max_tokens: int) -> int:
        return len(responses[0].token_ids)  # another number in validation


def picture_columns(pixels: Tensor) -> dict[str, Any]:
    """Return the inputs that stand for a response: an image (3, H, W), or a video (F, 3, H, W), in [0, 1]."""
    return {"images" if pixels.ndim == 3 else "videos": pixels, "response": "", "response_length": 0}


def sample_pictures(rows: SampledRows, count: int, worker: WorkerConfig) -> list[Response]:
    """Make three blank pictures, of the run's size, for each of the first usable rows."""
    family = family_of(downloaded(worker.actor.model))
    size = size_of(worker.rollout, family)
    image = torch.ones(3, size.height, size.width)
    blank = image if family.makes == "images" else image.expand(size.frames, -1, -1, -1)
    return [
        Response(f"row {row}, {name}", row, row, columns | picture_columns(shade * blank))
        for row, columns in rows.first(count).items()
        for name, shade in SHADES.items()
    ]


def described(pixels: np.ndarray) -> str:
    """Return `picture of 16 x 16 pixels`, width first, or `video of 9 frames of 16 x 16 pixels`."""
    return f"{'video' if pixels.ndim == 4 else 'picture'} of {_size(pixels)}"


def _size(pixels: np.ndarray) -> str:
    size = f"{pixels.shape[-1]} x {pixels.shape[-2]} pixels"
    return f"{len(pixels)} frames of {size}" if pixels.ndim == 4 else size
