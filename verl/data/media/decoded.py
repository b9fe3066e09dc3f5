# SPDX-License-Identifier: Apache-2.0
"""Decoded media of a prompt: their shapes, their order, and the inputs that a model makes of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from verl.models.families.interface import Kind, MediaFamily, MediaShape, Medium, MediumShape


@dataclass(frozen=True)
class DecodedMedia:
    """Pixels and samples of one prompt's media, in the order of their markers."""

    images: list[Image.Image] = field(default_factory=list)  # RGB
    videos: list[tuple[np.ndarray, dict[str, Any]]] = field(default_factory=list)  # (T, H, W, 3) uint8, meta
    audios: list[tuple[np.ndarray, int]] = field(default_factory=list)  # (N,) float32, samples per second
    sounds: list[tuple[np.ndarray, int]] = field(default_factory=list)  # of each video, if they are heard


def shape_of(family: MediaFamily, processor: Any, decoded: DecodedMedia) -> MediaShape:
    """Return the shapes of decoded media."""
    sounds = [samples for samples, _ in decoded.sounds] or [None] * len(decoded.videos)
    return MediaShape(
        [family.image_shape(processor, image.height, image.width) for image in decoded.images],
        [
            video_shape(family, processor, frames, with_sound(meta, sound))
            for (frames, meta), sound in zip(decoded.videos, sounds, strict=True)
        ],
        [family.audio_shape(processor, len(samples)) for samples, _ in decoded.audios],
    )


def media_in_order(
    family: MediaFamily, processor: Any, prompt_ids: list[int], decoded: DecodedMedia, shape: MediaShape
) -> list[Medium]:
    """Return decoded media as the model's encoders read them, in the order of their placeholders."""
    given: dict[Kind, list[dict[str, Tensor]]] = {
        "image": [family.image_inputs(processor, image) for image in decoded.images],
        "video": [family.video_inputs(processor, *video) for video in decoded.videos],
        "audio": [family.audio_inputs(processor, samples) for samples, _ in decoded.audios],
    }
    remaining = {kind: zip(inputs, shape.of(kind), strict=True) for kind, inputs in given.items()}
    sounds = iter(decoded.sounds)
    kinds = family.placeholders(processor)
    found: list[Medium] = []
    order: list[Kind] = [kinds[token] for token in prompt_ids if token in kinds]
    for kind in order:
        tensors, each = next(remaining[kind])
        found.append(Medium(kind, tensors, each.facts))
        if kind == "video" and decoded.sounds:
            samples, _ = next(sounds)
            facts = family.audio_shape(processor, len(samples)).facts
            found.append(Medium("audio", family.audio_inputs(processor, samples), facts))
    return found


def with_sound(meta: Mapping[str, Any], samples: np.ndarray | None) -> dict[str, Any]:
    return {**meta} if samples is None else {**meta, "num_samples": len(samples)}


def video_shape(
    family: MediaFamily, processor: Any, frames: np.ndarray, meta: Mapping[str, Any]
) -> MediumShape:
    num_frames, height, width, _ = frames.shape
    return family.video_shape(processor, num_frames, height, width, meta)
