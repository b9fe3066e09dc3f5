# SPDX-License-Identifier: Apache-2.0
"""Settings of `verl-longvideo-reason`, checked before a video is opened or a request is sent."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_longvideo.prompts import Prompts

SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv")
STEPS = ("split", "caption", "merge", "reason", "parse", "reformat")
AS_FRAMES, AS_VIDEO = "frames", "video"  # how a clip is sent


@dataclass(frozen=True)
class CutSettings:
    """Length, rate and size of clips."""

    seconds: float  # of a clip
    fps: float  # frames of a clip per second, at most the video's
    side: int  # pixels of the longer side, at most the video's


@dataclass(frozen=True)
class ModelSettings:
    """A model behind an OpenAI-compatible endpoint."""

    url: str
    model: str
    key_env: str | None
    temperature: float
    max_tokens: int

    @property
    def identity(self) -> list[Any]:
        """Facts that change its answers; the same model may move to another address."""
        return [self.model, self.temperature, self.max_tokens]


@dataclass(frozen=True)
class Settings:
    """A whole pipeline."""

    video_dir: Path
    out: Path
    prompts: Prompts
    cut: CutSettings
    caption: ModelSettings
    reason: ModelSettings
    until: str  # last of STEPS to do
    retry_malformed: bool  # ask again where the last answer could not be used
    clips_as: str  # AS_FRAMES or AS_VIDEO
    frames: int  # of a clip that is sent as frames
    questions: int  # of each category and video
    rewrite: bool  # reasons become prose by a request for each question
    val_videos: int
    sft_share: float  # of the other videos, whose questions are for fine-tuning
    seed: int
    concurrency: int
    max_retries: int
    timeout_s: float
    workers: int  # videos that are cut at once

    @cached_property
    def videos(self) -> list[str]:
        """Names of the videos: paths below `video_dir`, sorted."""
        found = (path for path in self.video_dir.rglob("*") if path.suffix.lower() in SUFFIXES)
        out = self.out.resolve()
        return sorted(
            path.relative_to(self.video_dir).as_posix()
            for path in found
            if path.is_file() and not path.resolve().is_relative_to(out)
        )

    def does(self, step: str) -> bool:
        """Return whether a step of `STEPS` is to be done."""
        return STEPS.index(step) <= STEPS.index(self.until)

    @property
    def models(self) -> list[ModelSettings]:
        """Models that the steps to do ask."""
        asking = {"caption": self.caption, "reason": self.reason}
        return [model for step, model in asking.items() if self.does(step)]

    def check(self) -> None:
        """Raise a ValueError that names the switch, the rule, the value and the remedy."""
        if not self.video_dir.is_dir():
            raise ValueError(f"`--videos` ({self.video_dir}) must be a folder of videos, but is none")
        for name, value, minimum in (
            ("--clip-seconds", self.cut.seconds, 1), ("--clip-fps", self.cut.fps, 0.01),
            ("--clip-side", self.cut.side, 16), ("--frames", self.frames, 1),
            ("--questions", self.questions, 1), ("--val-videos", self.val_videos, 0),
            ("--concurrency", self.concurrency, 1), ("--workers", self.workers, 1),
            ("--caption-max-tokens", self.caption.max_tokens, 1),
            ("--reason-max-tokens", self.reason.max_tokens, 1),
        ):  # fmt: skip
            if value < minimum:
                raise ValueError(f"`{name}` must be at least {minimum}, got {value}")
        if not 0 <= self.sft_share <= 1:
            raise ValueError(f"`--sft-share` must be from 0 to 1, got {self.sft_share}")
        if not self.videos:
            raise ValueError(
                f"`--videos` ({self.video_dir}) has no videos: looked for files that end in"
                f" {', '.join(SUFFIXES)}"
            )
        if self.val_videos >= len(self.videos):
            raise ValueError(
                f"`--val-videos` ({self.val_videos}) must be less than the number of videos"
                f" ({len(self.videos)}): the others are for training"
            )
        self.prompts.check()
        for model in self.models:
            if model.key_env is not None and not os.environ.get(model.key_env, "").strip():
                raise ValueError(
                    f"`--key-env` ({model.key_env}) must name an environment variable that holds the key of"
                    f" {model.url}, but it is not set: export it"
                )
