# SPDX-License-Identifier: Apache-2.0
"""Tokens and positions of Qwen2.5-Omni's videos with sound in vLLM, as training has them.

vLLM 0.32 starts a video's positions at the token before it, leaves out the sound of two seconds without a
frame, and counts time in float32 for tokens and in float64 for positions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl.models.families.interface import MediaShape, MediumShape
from verl.models.families.qwen_omni import audio_tokens, turns_of
from verl.models.families.registry import vision_family_of


def tokens_with_sound(
    _cls: type, thinker_config: Any, audio_len: int, video_grid_thw: Any, video_second_per_grid_t: float
) -> list[int]:
    """Return the tokens that replace a video's, instead of `omni_get_updates_use_audio_in_video`."""
    patches, height, width = map(int, video_grid_thw)
    patch = height * width // thinker_config.vision_config.spatial_merge_size**2
    tokens = [thinker_config.audio_start_token_id]
    for kind, count in turns_of(patches, float(video_second_per_grid_t), int(audio_len)):
        is_video = kind == "video"
        token = thinker_config.video_token_id if is_video else thinker_config.audio_token_id
        tokens += [token] * (count * patch if is_video else count)
    return [*tokens, thinker_config.audio_end_token_id]


def positions_with_sound(
    model: Any, input_tokens: list[int], mm_features: Sequence[Any]
) -> tuple[Tensor, int]:
    """Return positions (3, L) and what is added later on, instead of `get_mrope_input_positions`."""
    config, ids = model.config, torch.tensor(input_tokens)
    ordered = sorted(mm_features, key=lambda feature: feature.mm_position.offset)
    sounds = iter([_value(each, "audio_feature_lengths") for each in ordered if each.modality == "audio"])
    shape = MediaShape()
    for each in ordered:
        if each.modality == "audio":
            continue
        facts: dict[str, Any] = {"grid_thw": _value(each, f"{each.modality}_grid_thw").tolist()}
        if each.modality == "video":
            facts["second_per_grid_ts"] = seconds = float(_value(each, "second_per_grid_ts"))
            if bool(_value(each, "use_audio_in_video")):
                heard = audio_tokens(int(next(sounds)))
                facts["turns"] = turns_of(facts["grid_thw"][0], seconds, heard)
        shape.of(each.modality).append(MediumShape([], facts))
    found = vision_family_of(config).positions(config, ids, shape)
    assert found is not None, "the family has positions in time, height and width"
    return found[1:], int(found[1, -1]) + 1 - len(ids)  # responses continue the last position


def _value(feature: Any, name: str) -> Tensor:
    return feature.data[name].data
