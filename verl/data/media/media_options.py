# SPDX-License-Identifier: Apache-2.0
"""How images and videos are read."""

from dataclasses import dataclass
from typing import Any

from verl.data.media.media_urls import UrlOptions
from verl.data.media.sizes import smallest_budget
from verl.data.media.video import VideoOptions


@dataclass(frozen=True)
class MediaOptions:
    """How media are read; equal in every process of a run, which is what lets them share the cache.

    Attributes:
        min_pixels: Smaller images and frames are enlarged.
        max_pixels: Larger images and frames are reduced.
        video_fps: Frames taken from a second of video.
        run_id: Names the run's cache on each node; None caches in each process by itself.
        num_video_frames: Frames taken from a whole video instead; None goes by `video_fps`.
        tokens_per_frame: Tokens of a video frame at most, which comes before `min_pixels`; None does not
            limit them.
        cache_dir: Folder that keeps decoded videos for later runs; None keeps none.
        urls: How media that rows name by URL are fetched; None is not at all.
    """

    min_pixels: int
    max_pixels: int
    video_fps: float = 2.0
    run_id: str | None = None
    num_video_frames: int | None = None
    tokens_per_frame: int | None = None
    cache_dir: str | None = None
    urls: UrlOptions | None = None

    @classmethod
    def from_data(
        cls,
        data: Any,
        run_id: str | None = None,
        *,
        num_video_frames: int | None = None,
        tokens_per_frame: int | None = None,
    ) -> "MediaOptions":
        """Take them from the `data` section of a config, and from options elsewhere."""
        return cls(
            data.min_pixels,
            data.max_pixels,
            data.video_fps,
            run_id,
            num_video_frames,
            tokens_per_frame,
            data.cache_dir,
            UrlOptions.from_data(data) if data.allow_media_urls else None,
        )

    def of_videos(self, factor: int) -> VideoOptions:
        """What concerns videos, for a model whose merged patches are `factor` pixels wide."""
        return VideoOptions(
            self.min_pixels,
            self.max_pixels,
            factor,
            self.video_fps,
            self.num_video_frames,
            self.tokens_per_frame,
        )

    def check_budget(self, video_processor: Any) -> None:
        """Check that the processor's own resizing keeps `tokens_per_frame`.

        Raises:
            ValueError: It would enlarge frames beyond it.
        """
        smallest = smallest_budget(video_processor)
        if self.tokens_per_frame is not None and self.tokens_per_frame < smallest:
            raise ValueError(
                f"`tokens_per_frame` must be at least {smallest} for this model, got {self.tokens_per_frame}:"
                " its processor enlarges smaller frames"
            )
