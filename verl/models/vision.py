# SPDX-License-Identifier: Apache-2.0
"""One vision-tower call for all images and videos of a micro batch, and the tokens that they replace.

Under FSDP every rank must run the tower equally often, so images and videos are encoded together, and rows
without media get a small blank image (`dummy_row`). Ranks with the same rows each encode some of the frames
(`MediaShare`); the tower's attention stays within a frame, so the features are the same.

Grids stay on CPU, where everything that a tower derives from them is computed, so that no length is read back
from the device.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.distributed.device import to_device
from verl.distributed.length_balancing import split_evenly
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.ulysses import gather_rows

VISION_UTILS = "transformers.vision_utils"  # 5.16 and later
vision_utils: Any = importlib.import_module(VISION_UTILS) if find_spec(VISION_UTILS) else None
TOWER_INPUTS = ("cu_seqlens", "position_ids", "window_index", "interpolation_indices_and_weights")
# In older versions of transformers towers take only grids.
TOWERS_TAKE_INPUTS = all(hasattr(vision_utils, f"get_vision_{name}") for name in TOWER_INPUTS)


@dataclass(frozen=True)
class EncodedMedia:
    """Features of images or of videos, with the field names that the models expect."""

    pooler_output: tuple[Tensor, ...]  # (tokens, hidden size) for each image
    deepstack_features: list[tuple[Tensor, ...]] | None = None  # the same for each deepstack level

    @classmethod
    def of_joined(cls, features: Sequence[Tensor], hidden_size: int) -> "EncodedMedia":
        pooled, *levels = zip(*(part.split(hidden_size, -1) for part in features), strict=True)
        return cls(pooled, levels or None)

    def joined(self) -> list[Tensor]:
        """Concatenate the levels of each image: (tokens, hidden size x (1 + levels))."""
        levels = (self.pooler_output, *(self.deepstack_features or []))
        return [torch.cat(parts, -1) for parts in zip(*levels, strict=True)]


class MediaRows(NamedTuple):
    """The tokens of a packed sequence that stand for images, or for videos."""

    packed: Tensor  # (n,) int64: all of them, in the order of the features
    local: Tensor  # (m,) int64: those on this rank, as positions among its tokens
    owned: Tensor | None = None  # (m,) int64: their features among the n; None means all

    def select(self, features: Tensor) -> Tensor:
        """(n, D) to (m, D)."""
        return features if self.owned is None else features.index_select(0, self.owned)


@dataclass(frozen=True, eq=False)
class MediaShare:
    """The division of all media's frames, in order, over the ranks that share a packed sequence."""

    images: int  # number of images, which come before the videos
    tokens: tuple[int, ...]  # of each image, then of each video
    counts: tuple[int, ...]  # tokens that each rank encodes
    sp: SequenceParallel

    def gather(self, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gather the features of all media from those of this rank; gradients are summed over the ranks."""
        own = torch.cat(list(features))[: self.counts[self.sp.index]]  # without a blank image
        gathered = gather_rows(own, self.counts, self.sp, sum_gradients=True, chunks=self.sp.gather_chunks)
        return gathered.split(self.tokens)


class DummyRow(NamedTuple):
    """A row of tokens with one small blank image."""

    input_ids: Tensor  # (L,) int64
    pixel_values: Tensor
    image_grid_thw: Tensor  # (1, 3)

    @property
    def media(self) -> dict[str, Tensor]:
        return {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}


def encode_media(
    owner: Any,  # the module with `get_image_features`
    # `pixel_values` and `image_grid_thw`, `pixel_values_videos` and `video_grid_thw`; grids best as lists
    media: dict[str, Any],
    image_order: list[int] | None = None,  # index of the image at each place in the tokens
    video_order: list[int] | None = None,
    share: MediaShare | None = None,  # `media` are this rank's share, from `share_media`
) -> dict[str, EncodedMedia]:
    """Encode all images and videos in one vision-tower call; return features of "image" and "video"."""
    pixels, grids, images = _joined_media(media)
    joined = torch.cat(pixels)
    if grids.device.type == "cpu" and TOWERS_TAKE_INPUTS:
        inputs = _tower_inputs(owner.visual, grids, joined.device)
    else:
        grids, inputs = grids.to(joined.device), {}  # the tower reads them back
    encoded = owner.get_image_features(joined, grids, return_dict=True, **inputs)
    pooled = encoded.pooler_output
    levels = getattr(encoded, "deepstack_features", None)  # Qwen3-VL only
    if share is not None:
        images, pooled = share.images, share.gather(pooled)
        levels = None if levels is None else [share.gather(level) for level in levels]
    features = {}
    for kind, start, stop, order in (
        ("image", 0, images, image_order),
        ("video", images, len(pooled), video_order),
    ):
        chosen = range(start, stop) if order is None else [start + index for index in order]
        if chosen:
            features[kind] = EncodedMedia(
                tuple(pooled[index] for index in chosen),
                None if levels is None else [tuple(level[index] for index in chosen) for level in levels],
            )
    return features


def with_grids_as_lists(media: dict[str, Tensor]) -> dict[str, Any]:
    """Replace the grids of model inputs by numbers, which FSDP does not send to the device."""
    return {name: value.tolist() if name.endswith("grid_thw") else value for name, value in media.items()}


def media_tokens(config: Any, input_ids: Tensor) -> dict[str, Tensor]:
    """Return the positions of the tokens of images and of videos in a packed sequence (N,)."""
    ids = {"image": config.image_token_id, "video": config.video_token_id}
    return {kind: (input_ids == token).nonzero()[:, 0] for kind, token in ids.items()}


def _tower_inputs(tower: Any, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Compute on CPU what a tower derives from its grids, by the keywords of `get_image_features`."""
    merge = tower.spatial_merge_size
    on_cpu = {"image_cu_seqlens": vision_utils.get_vision_cu_seqlens(grids)}
    on_device = {"image_position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    if hasattr(tower, "window_size"):
        index, bounds = vision_utils.get_vision_window_index(
            grids, merge, tower.window_size, tower.patch_size
        )
        on_device["image_window_index"], on_cpu["image_cu_window_seqlens"] = index, bounds
    if hasattr(tower, "interpolation_mode"):
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
        on_device |= {"image_interp_indices": indices, "image_interp_weights": weights}
    return on_cpu | to_device(on_device, device)


def _joined_media(media: dict[str, Any]) -> tuple[list[Tensor], Tensor, int]:
    """Return the pixels and the grids of images, then of videos, and the number of images."""
    pixels = [media[key] for key in ("pixel_values", "pixel_values_videos") if key in media]
    grids = [torch.as_tensor(media[key]) for key in ("image_grid_thw", "video_grid_thw") if key in media]
    return pixels, torch.cat(grids), len(media.get("image_grid_thw", ()))


def share_media(
    config: Any, media: dict[str, Tensor], sp: SequenceParallel
) -> tuple[dict[str, Tensor], MediaShare]:
    """Select this rank's frames of the media of a packed sequence: the largest share of patches is minimal.

    Returns `pixel_values` and `image_grid_thw` of this rank, for images and videos alike.
    """
    pixels, grids, images = _joined_media(media)
    grids = grids.cpu()
    merged = config.vision_config.spatial_merge_size**2  # patches of a token
    frames = grids[:, 1:].prod(-1).repeat_interleave(grids[:, 0])  # (F,): patches of each
    bounds = split_evenly(frames.tolist(), sp.size)
    ends = torch.nn.functional.pad(frames.cumsum(0), (1, 0))[bounds]  # (size + 1,): in patches
    tokens, counts = (tuple((patches // merged).tolist()) for patches in (grids.prod(-1), ends.diff()))
    share = MediaShare(images, tokens, counts, sp)
    first, last = bounds[sp.index : sp.index + 2]
    if first == last:  # every rank runs the tower
        return dummy_row(config).media, share
    stops = grids[:, 0].cumsum(0)  # of each medium, in frames
    held = stops.clamp(first, last) - (stops - grids[:, 0]).clamp(first, last)  # its frames on this rank
    own = torch.cat([held[:, None], grids[:, 1:]], 1)[held > 0]
    start, stop = ends[sp.index : sp.index + 2].tolist()
    return {"pixel_values": _row_range(pixels, start, stop), "image_grid_thw": own}, share


def _row_range(parts: list[Tensor], start: int, stop: int) -> Tensor:
    """Return rows `start` to `stop` of the concatenated parts, without concatenating the rest."""
    rows = []
    for part in parts:
        rows.append(part[max(start, 0) : max(stop, 0)])
        start, stop = start - len(part), stop - len(part)
    return torch.cat(rows)


def dummy_row(config: Any, rows: int = 1, columns: int = 1) -> DummyRow:
    """Build a row that contains only a blank image of `rows` x `columns` tokens."""
    vision = config.vision_config
    merge = vision.spatial_merge_size
    values = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    image = [config.image_token_id] * (rows * columns)
    return DummyRow(
        torch.tensor([config.vision_start_token_id, *image, config.vision_end_token_id]),
        torch.zeros(len(image) * merge * merge, values),
        torch.tensor([[1, rows * merge, columns * merge]]),
    )
