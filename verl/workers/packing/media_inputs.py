# SPDX-License-Identifier: Apache-2.0
"""Model inputs of a micro batch's media: each distinct medium once, and the order they are used in."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from verl.protocol import DataProto

MediaRow = dict[str, Any]  # `images` and `videos` of a row
Features = dict[str, Tensor]  # model inputs by name

FEATURE_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
GRID_OF_ORDER = {"image_order": "image_grid_thw", "video_order": "video_grid_thw"}
BLANK: MediaRow = {}  # a blank image, encoded where a rank's rows have no media


class MediaFeatures(Protocol):
    """Decodes a row's media: `verl.data.media.loader.MediaLoader`."""

    def features(self, multi_modal_data: MediaRow, /) -> Features: ...


@dataclass(frozen=True)
class WholeRows:
    """Metadata of a micro batch whose rows this rank runs alone, while others run other rows."""

    media: tuple[MediaRow, ...] | None  # of all ranks' rows, to be encoded together; None: each its own

    @classmethod
    def of(cls, micro: DataProto) -> "WholeRows | None":
        return micro.meta_info.get("whole_rows")

    def attach_to(self, micro: DataProto) -> DataProto:
        return DataProto(micro.batch, micro.non_tensor_batch, micro.meta_info | {"whole_rows": self})


def has_media(row: MediaRow | None) -> bool:
    return bool(row) and any(row.values())


def join_features(parts: Iterable[Features]) -> Features:
    # not every part has every name
    joined: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.items():
            joined.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in joined.items()}


def media_inputs(
    rows: Iterable[MediaRow], encoded: Iterable[MediaRow], features_of: Callable[[MediaRow], Features]
) -> tuple[Features, dict[str, list[int]]]:
    """Make the inputs of all distinct rows in `encoded`, among them `rows`.

    Returns:
        The joined inputs, and for `rows` in order the index of each image and video among the encoded ones.
    """
    made: dict[tuple, Features] = {}
    for row in encoded:
        key = _media_key(row)
        if key not in made:
            made[key] = features_of(row)
    order: dict[str, list[int]] = {}
    for name, grid in GRID_OF_ORDER.items():
        counts = [len(features[grid]) if grid in features else 0 for features in made.values()]
        bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
        index = {key: range(start, stop) for key, (start, stop) in zip(made, bounds, strict=True)}
        order[name] = [number for row in rows for number in index[_media_key(row)]]
    known = ({name: value for name, value in f.items() if name in FEATURE_KEYS} for f in made.values())
    return join_features(known), order


def _media_key(row: MediaRow) -> tuple:
    # two rows show the same media if their references are the same
    return tuple(
        (kind, tuple(tuple(sorted(ref.items())) if isinstance(ref, dict) else ref for ref in refs))
        for kind, refs in sorted(row.items())
        if refs
    )
