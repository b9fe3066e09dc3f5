# SPDX-License-Identifier: Apache-2.0
"""Options for reading media, and the sizes of images on their way into a model.

Single media have options as in rows for qwen-vl-utils, `{"video": "a.mp4", "fps": 1.0}`, instead of those of
the run. `worker.rollout.tokens_per_frame` and the model's own limits still apply. Where a model has as many
tokens for an image of any size, limits of its pixels are refused.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, TypeVar

from PIL import Image

from verl.config.data import RowsConfig
from verl.data.bad_rows import BadRowError
from verl.data.media.audio import AudioOptions
from verl.data.media.references import Reference
from verl.data.media.video import SizeOptions, VideoOptions
from verl.utils.images import to_rgb

Options = TypeVar("Options", SizeOptions, VideoOptions, AudioOptions)
SOURCES = ("bytes", "path", "type", "array", "sampling_rate")
LIMITS = ("min_pixels", "max_pixels")
SIZES = (*LIMITS, "resized_height", "resized_width")
COUNTS = (*SIZES, "nframes", "min_frames", "max_frames")
NAMES = {
    "image": SIZES,
    "video": (*COUNTS, "fps", "video_start", "video_end"),
    "audio": ("audio_start", "audio_end"),
}
FRAMES = ("min_frames", "max_frames")
ORDERED = (LIMITS, FRAMES, ("video_start", "video_end"), ("audio_start", "audio_end"))
EXCLUSIVE = (("resized_height", LIMITS), ("nframes", ("fps", *FRAMES)))


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
    """Scale an image, as a viewer shows it, to a width and height."""
    image = to_rgb(image)
    return image if size == image.size else image.resize(size)


def read_item_options(item: Mapping[str, Any], kind: str) -> dict[str, int | float]:
    """Return the checked options of a medium; a BadRowError names what cannot be honored."""
    given = {key: value for key, value in item.items() if value is not None and key not in (*SOURCES, kind)}
    unknown = sorted(map(str, given.keys() - set(NAMES[kind])))
    if unknown:
        raise BadRowError(
            f"the {kind} has {unknown}, which have no effect here: remove them; its options are {NAMES[kind]}"
        )
    options = {name: _number(kind, name, value) for name, value in given.items()}
    for problem in _conflicts(options):
        raise BadRowError(f"the {kind} has {problem}")
    return options


def without_effect(names: Sequence[str], sized_by: Sequence[str]) -> str:
    """Say that limits of pixels have no effect, and which options of the processor have."""
    ours, theirs = (", ".join(f"`{name}`" for name in each) for each in (names, sized_by))
    return (
        f"{ours}, without effect on this model: its processor's {theirs} decide its number of tokens, not"
        f" the pixels: remove {'it' if len(names) == 1 else 'them'}, or change the processor's configuration"
    )


def _conflicts(options: Mapping[str, int | float]) -> Iterator[str]:
    for low, high in ORDERED:
        if low in options and high in options and options[low] > options[high]:
            yield f"a `{low}` ({options[low]}) above its `{high}` ({options[high]})"
    for name, others in EXCLUSIVE:
        both = [other for other in others if other in options]
        if name in options and both:
            yield f"`{name}`, which leaves {both} without effect: remove one of them"
    if ("resized_height" in options) != ("resized_width" in options):
        yield "only one of `resized_height` and `resized_width`: give both or none"
    if options.get("nframes", 2) % 2:
        yield f"an odd `nframes` ({options['nframes']}): it must be even, because two frames share tokens"


def _number(kind: str, name: str, value: Any) -> int | float:
    is_count = name in COUNTS
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if is_count and number >= 1 and number.is_integer():
        return int(number)
    if not is_count and 0 <= number < math.inf and (number > 0 or name != "fps"):
        return number
    rule = "a whole number from 1 up" if is_count else "a positive number" + " or 0" * (name != "fps")
    raise BadRowError(f"`{name}` of the {kind} must be {rule}, got {value!r:.80}")


def with_item_options(options: Options, ref: Reference) -> Options:
    """Return the options of the run with those of a medium instead."""
    named = ref if isinstance(ref, dict) else {}
    kind = "audio" if isinstance(options, AudioOptions) else "video"
    item: dict[str, Any] = {name: named[name] for name in NAMES[kind] if name in named}
    if not item:
        return options
    if isinstance(options, AudioOptions):
        return replace(options, **item)
    height, width, num_frames = (
        item.pop(key, None) for key in ("resized_height", "resized_width", "nframes")
    )
    low, high = item.get("min_pixels"), item.get("max_pixels")
    if high is not None:  # a bound of the item moves the run's other one along
        item.setdefault("min_pixels", min(options.min_pixels, high))
    if low is not None:
        item.setdefault("max_pixels", max(options.max_pixels, low))
    if height is not None:
        item["size"] = (height, width)
    if num_frames is not None or {"fps", "min_frames", "max_frames"} & item.keys():
        item["num_frames"] = num_frames  # None: by rate, also in a run with a number of frames
    return replace(options, **item)
