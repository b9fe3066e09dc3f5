# SPDX-License-Identifier: Apache-2.0
"""Options of single media, as rows for qwen-vl-utils have them: `{"video": "a.mp4", "fps": 1.0}`.

They replace those of the run for one item. `worker.rollout.tokens_per_frame` and the model's own limits still
apply. Where a model has as many tokens for an image of any size, limits of its pixels are refused.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar

from verl.data.bad_rows import BadRowError
from verl.data.media.audio import AudioOptions
from verl.data.media.references import Reference
from verl.data.media.video import SizeOptions, VideoOptions

Options = TypeVar("Options", SizeOptions, VideoOptions, AudioOptions)
SOURCES = ("bytes", "path", "type", "array", "sampling_rate")
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
COUNTS = (*SIZES, "nframes", "min_frames", "max_frames")
NAMES = {
    "image": SIZES,
    "video": (*COUNTS, "fps", "video_start", "video_end"),
    "audio": ("audio_start", "audio_end"),
}
ORDERED = (
    ("min_pixels", "max_pixels"), ("min_frames", "max_frames"), ("video_start", "video_end"),
    ("audio_start", "audio_end"),
)  # fmt: skip
EXCLUSIVE = (
    ("resized_height", ("min_pixels", "max_pixels")),
    ("nframes", ("fps", "min_frames", "max_frames")),
)


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


def size_options(ref: Reference) -> list[str]:
    """Return the options of an image or a video that limit its pixels."""
    return [name for name in SIZES if ref.get(name) is not None] if isinstance(ref, dict) else []


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
