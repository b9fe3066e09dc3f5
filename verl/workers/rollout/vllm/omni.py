# SPDX-License-Identifier: Apache-2.0
"""Tokens, positions and features of Qwen2.5-Omni and Qwen3-Omni in vLLM, as training has them.

In Qwen2.5-Omni vLLM 0.32 starts a heard video's positions at the token before it, leaves out the sound of two
seconds without a frame, and counts time in float32 for tokens and in float64 for positions. In Qwen3-Omni it
orders a heard video's tokens by times with fractions and their positions by whole ones, and continues after
the largest position of all, where the model continues after the last token; and it pads the chunks of audio
to the longest of a call, so that features depend on what is encoded together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.models.families.audio.qwen2_5_omni import Qwen25Omni
from verl.models.families.interface import MediaShape, MediumShape
from verl.models.families.registry import media_family_of


def tokens_with_sound(
    _cls: type, thinker_config: Any, audio_len: int, video_grid_thw: Any, video_second_per_grid_t: float
) -> list[int]:
    """Return the tokens that replace a heard video's, instead of `get_updates_use_audio_in_video`."""
    patches, height, width = map(int, video_grid_thw)
    patch = height * width // thinker_config.vision_config.spatial_merge_size**2
    tokens = [thinker_config.audio_start_token_id]
    turns = omni_family_of(thinker_config).turns(patches, float(video_second_per_grid_t), int(audio_len))
    for kind, count in turns:
        is_video = kind == "video"
        token = thinker_config.video_token_id if is_video else thinker_config.audio_token_id
        tokens += [token] * (count * patch if is_video else count)
    return [*tokens, thinker_config.audio_end_token_id]


def positions_with_sound(
    model: Any, input_tokens: list[int], mm_features: Sequence[Any]
) -> tuple[Tensor, int]:
    """Return positions (3, L) and the offset of later ones, instead of `get_mrope_input_positions`."""
    config, ids = model.config, torch.tensor(input_tokens)
    family = omni_family_of(config)
    ordered = sorted(mm_features, key=lambda feature: feature.mm_position.offset)
    sounds = iter([_value(each, "audio_feature_lengths") for each in ordered if each.modality == "audio"])
    shape = MediaShape()
    for each in ordered:
        if each.modality == "audio":
            continue
        facts: dict[str, Any] = {"grid_thw": _value(each, f"{each.modality}_grid_thw").tolist()}
        if each.modality == "video":
            facts["second_per_grid_ts"] = seconds = float(_value(each, "second_per_grid_ts"))
            if _is_heard(each):
                heard = family.audio_tokens(int(next(sounds)))
                facts["turns"] = family.turns(facts["grid_thw"][0], seconds, heard)
        shape.of(each.modality).append(MediumShape([], facts))
    found = family.positions(config, ids, shape)
    return found[1:], int(found[1, -1]) + 1 - len(ids)  # responses continue the last position


def positions_where_heard(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `get_mrope_input_positions` for prompts with videos that are heard."""

    @functools.wraps(theirs)
    def positions(model: Any, input_tokens: list[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        is_heard = any(each.modality == "video" and _is_heard(each) for each in mm_features)
        return (positions_with_sound if is_heard else functools.partial(theirs))(
            model, input_tokens, mm_features
        )

    return positions


def with_whole_chunk(theirs: Callable[..., Tensor], frames: int, tokens: int) -> Callable[..., Tensor]:
    """Have an audio encoder pad all chunks to a whole one, with a blank clip of that many mel frames."""

    @functools.wraps(theirs)
    def encode(tower: Any, input_features: Tensor, feature_lens: Tensor, aftercnn_lens: Tensor) -> Tensor:
        blank = input_features.new_zeros(len(input_features), frames)
        mel = torch.cat([input_features, blank], 1)
        lengths = torch.cat([feature_lens, feature_lens.new_tensor([frames])])
        counts = torch.cat([aftercnn_lens, aftercnn_lens.new_tensor([tokens])])
        return theirs(tower, mel, lengths, counts)[:-tokens]

    return encode


def omni_family_of(config: Any) -> Qwen25Omni:
    """Return the family of a thinker's config."""
    family = media_family_of(config)
    assert isinstance(family, Qwen25Omni), f"{config.model_type} is no thinker"
    return family


def _is_heard(video: Any) -> bool:
    return bool(_value(video, "use_audio_in_video"))


def _value(feature: Any, name: str) -> Tensor:
    return feature.data[name].data
