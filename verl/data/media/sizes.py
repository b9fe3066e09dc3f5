# SPDX-License-Identifier: Apache-2.0
"""Options for reading media, and the sizes of images on their way into a model."""

import math
import sys
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from PIL import Image

from verl.config.data import RowsConfig
from verl.data.media.video import SizeOptions, VideoOptions

LIMITS = ("min_pixels", "max_pixels")


@dataclass(frozen=True)
class DownloadOptions:
    """Limits of downloads and where files are kept; equal in every process of a run."""

    hosts: tuple[str, ...] = ()  # the only reachable hosts; () is every public host
    timeout_s: float = 60.0  # for each file
    max_bytes: int = 1 << 30
    directory: str | None = None  # None is a folder of this user in each node's temporary folder

    @classmethod
    def from_data(cls, data: Any) -> "DownloadOptions":
        """Take them from the `data` section of a config."""
        hosts = tuple(host.lower() for host in data.media_url_hosts)
        return cls(hosts, data.media_url_timeout_s, data.media_url_max_mb << 20, data.media_url_dir)


@dataclass(frozen=True)
class MediaOptions:
    """Options for reading media; equal in every process of a run, so that they can share the cache."""

    min_pixels: int  # smaller images and frames are enlarged
    max_pixels: int  # larger images and frames are reduced
    video_fps: float = 2.0  # frames sampled per second of video
    run_id: str | None = None  # name of the run's cache on each node; None caches within each process
    num_video_frames: int | None = None  # frames sampled from a whole video; None uses `video_fps`
    tokens_per_frame: int | None = None  # upper limit, takes precedence over `min_pixels`
    cache_dir: str | None = None  # keeps decoded videos for later runs
    urls: DownloadOptions | None = None  # None refuses URLs
    limits: tuple[str, ...] = ()  # names of the bounds of pixels that the user chose
    hears_videos: bool = False  # along with their frames, if the model hears

    @classmethod
    def from_data(cls, data: Any, **others: Any) -> "MediaOptions":
        """Take them from the `data` section of a config, except for `others`."""
        urls = DownloadOptions.from_data(data) if data.allow_media_urls else None
        pixels = data.min_pixels or 0, data.max_pixels or sys.maxsize  # null: unbounded
        limits = tuple(f"data.{name}" for name in chosen_limits(data))
        return cls(
            *pixels, data.video_fps, cache_dir=data.cache_dir, urls=urls, limits=limits,
            hears_videos=data.use_audio_in_video, **others,
        )  # fmt: skip

    def of_images(self) -> SizeOptions:
        return SizeOptions(self.min_pixels, self.max_pixels)

    def of_videos(self, factor: int) -> VideoOptions:
        """Video options for a model whose merged patches are `factor` pixels wide."""
        return VideoOptions(
            self.min_pixels, self.max_pixels, factor, self.video_fps, self.num_video_frames,
            self.tokens_per_frame,
        )  # fmt: skip

    def check_budget(self, smallest: int) -> None:
        """Raise a ValueError if the processor itself would enlarge frames beyond `tokens_per_frame`."""
        if self.tokens_per_frame is not None and self.tokens_per_frame < smallest:
            raise ValueError(
                f"`tokens_per_frame` must be at least {smallest} for this model, got {self.tokens_per_frame}:"
                " its processor enlarges smaller frames"
            )


def chosen_limits(options: Any) -> list[str]:
    """Return the bounds of pixels that differ from their defaults; null means unbounded."""
    defaults = {field.name: field.default for field in fields(RowsConfig)}
    return [name for name in LIMITS if getattr(options, name) not in (None, defaults[name])]


def resized_size(width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Scale width and height to between `min_pixels` and `max_pixels`, keeping the aspect ratio."""
    pixels = min(max(width * height, min_pixels), max_pixels)
    if pixels == width * height:
        return width, height
    factor = math.sqrt(pixels / (width * height))
    return max(1, int(width * factor)), max(1, int(height * factor))


def process_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale an image to a width and height, as RGB."""
    image = to_8_bits(image)
    image.load()
    resized = image if size == image.size else image.resize(size)
    return resized if resized.mode == "RGB" else resized.convert("RGB")


def to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit, integer and float pixels, which Pillow would clip at 255, to gray levels.

    16-bit pixels have the range 0 to 65535. Others have the first of the ranges 0 to 1 (floats only), 0 to
    255 and 0 to 65535 that contains all of them, else that from the smallest to the largest. NaN and infinity
    count as 0.
    """
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    pixels = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0)
    low, high = pixels.min(), pixels.max()
    tops = {"I": (255, 65535), "F": (1, 255, 65535)}.get(image.mode, (65535,))
    top = next((top for top in tops if low >= 0 and high <= top), None)
    low, size = (low, high - low or 1) if top is None else (0, top)
    return Image.fromarray(((pixels - low) * 255 / size).round().astype(np.uint8))
