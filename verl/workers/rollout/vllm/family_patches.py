# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM for single model families, by the names in their `engine_patches`.

In Qwen2.5-Omni vLLM 0.32 starts a heard video's positions at the token before it, leaves out the sound of two
seconds without a frame, and counts time in float32 for tokens and in float64 for positions. In Qwen3-Omni it
orders a heard video's tokens by times with fractions and their positions by whole ones, and continues after
the largest position of all, where the model continues after the last token; and it pads the chunks of audio
to the longest of a call, so that features depend on what is encoded together.
"""

import importlib
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.models.families.audio.qwen2_5_omni import Qwen25Omni
from verl.models.families.audio.qwen3_omni import CHUNK_FRAMES, CHUNK_TOKENS
from verl.models.families.interface import Family, MediaShape, MediumShape
from verl.models.families.registry import media_family_of
from verl.workers.rollout.vllm.patches import replaceable, replacing, wrap, wrapping

QWEN2_5_OMNI = "vllm.model_executor.models.qwen2_5_omni_thinker"


def apply_family_patches(family: Family) -> None:
    """Patch vLLM for a family's models, before an engine is built; safe to call again."""
    for patch in family.engine_patches:
        globals()[patch]()
    for schema in family.engine_schemas:
        take_features_of_any_length(schema)


@replacing("vllm.model_executor.models.glm4_1v:Glm4vProcessingInfo", "_get_video_second_idx_glm46v")
def keep_times_of_frames(self: Any, metadata: dict[str, Any], total_frames: int) -> list[float]:
    """Have vLLM write the times of a GLM-4.6V video's frames in tenths of a second, as its processor does.

    They are those of the first frame of each temporal patch; frames were sampled before.
    """
    # vLLM 0.32 rounds them down to seconds, so that the engine would read another prompt than training
    step = self.get_video_processor().temporal_patch_size
    return [index / metadata["fps"] for index in metadata["frames_indices"][::step]]


@replacing("vllm.model_executor.models.glm4_1v:Glm4vProcessingInfo", "get_supported_mm_limits")
def take_several_videos(self: Any) -> dict[str, None]:
    """Have vLLM take prompts with several videos for GLM-4.xV, of which it allows one."""
    # its code for these models handles any number of them
    return {"image": None, "video": None}


@replacing("vllm.model_executor.models.minicpmv4_7:MiniCPMV4_7ProcessingInfo", "get_image_max_slice_num")
def slice_images_as_the_processor_does(self: Any) -> int:
    """Have vLLM expand images of MiniCPM-V 4.7 by the largest number of slices that its processor makes."""
    # vLLM 0.32 takes that of the config, or 9, so that the engine would read another prompt than training
    return self.get_image_processor().max_slice_nums


@wrapping(f"{QWEN2_5_OMNI}:Qwen2_5OmniThinkerMultiModalProcessor", "_postprocess_hf_mm_data")
def take_times_of_videos(
    theirs: Callable[..., Any], self: Any, hf_data: Any, hf_kwargs: Any, *others: Any
) -> Any:
    """Have vLLM take the seconds of a temporal patch of Qwen2.5-Omni's videos from the prompt's options."""
    # its processor supposes two frames a second for all videos, whatever was sampled
    processed = theirs(self, hf_data, hf_kwargs, *others)
    if hf_kwargs.get("second_per_grid_ts"):
        processed["second_per_grid_ts"] = torch.tensor(hf_kwargs["second_per_grid_ts"])
    return processed


def take_turns_of_videos_and_their_sound() -> None:
    """Have vLLM give Qwen2.5-Omni's videos with sound the tokens and positions that training has."""
    processor = replaceable(
        f"{QWEN2_5_OMNI}:Qwen2_5OmniThinkerMultiModalProcessor", "omni_get_updates_use_audio_in_video"
    )
    processor.omni_get_updates_use_audio_in_video = classmethod(tokens_with_sound)
    model = f"{QWEN2_5_OMNI}:Qwen2_5OmniThinkerForConditionalGeneration"
    replaceable(model, "get_mrope_input_positions").get_mrope_input_positions = positions_with_sound


def take_turns_of_qwen3_omni() -> None:
    """Have vLLM give Qwen3-Omni's videos with sound, and its audio, what training has."""
    module = "vllm.model_executor.models.qwen3_omni_moe_thinker"
    processor = replaceable(
        f"{module}:Qwen3OmniMoeThinkerMultiModalProcessor", "get_updates_use_audio_in_video"
    )
    processor.get_updates_use_audio_in_video = tokens_with_sound
    model = f"{module}:Qwen3OmniMoeThinkerForConditionalGeneration"
    wrap(model, "get_mrope_input_positions", _positions_where_heard)
    wrap(f"{module}:Qwen3OmniMoeAudioEncoder", "forward", _with_whole_chunk)


def size_frames_as_the_files_say() -> None:
    """Have the processors of omni models limit the pixels of frames as their video processors' files say."""
    # they have limits of their own for them, so that the engine would enlarge frames that training does not
    for name, kwargs in (
        ("qwen2_5_omni", "Qwen2_5OmniProcessorKwargs"),
        ("qwen3_omni_moe", "Qwen3OmniMoeProcessorKwargs"),
    ):
        module = importlib.import_module(f"transformers.models.{name}.processing_{name}")
        getattr(module, kwargs)._defaults["videos_kwargs"].pop("size", None)


def take_features_of_any_length(schema: str) -> None:
    """Let a schema `module:class` of vLLM hold features of images with different numbers of tokens."""
    hints = typing.get_type_hints(replaceable(schema, "validate"), include_extras=True)
    (shape,) = hints["data"].__metadata__  # of (images, tokens, hidden size)
    shape.dynamic_dims.add(shape.dims[1])


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


def _positions_where_heard(
    theirs: Callable[..., Any], model: Any, input_tokens: list[int], mm_features: Sequence[Any]
) -> tuple[Tensor, int]:
    is_heard = any(each.modality == "video" and _is_heard(each) for each in mm_features)
    return (positions_with_sound if is_heard else theirs)(model, input_tokens, mm_features)


def _with_whole_chunk(
    theirs: Callable[..., Tensor],
    tower: Any,
    input_features: Tensor,
    feature_lens: Tensor,
    aftercnn_lens: Tensor,
) -> Tensor:
    """Have an audio encoder pad all chunks to a whole one, with a blank clip of that many mel frames."""
    blank = input_features.new_zeros(len(input_features), CHUNK_FRAMES)
    mel = torch.cat([input_features, blank], 1)
    lengths = torch.cat([feature_lens, feature_lens.new_tensor([CHUNK_FRAMES])])
    counts = torch.cat([aftercnn_lens, aftercnn_lens.new_tensor([CHUNK_TOKENS])])
    return theirs(tower, mel, lengths, counts)[:-CHUNK_TOKENS]


def omni_family_of(config: Any) -> Qwen25Omni:
    family = media_family_of(config)
    assert isinstance(family, Qwen25Omni), f"{config.model_type} is no thinker"
    return family


def _is_heard(video: Any) -> bool:
    return bool(_value(video, "use_audio_in_video"))


def _value(feature: Any, name: str) -> Tensor:
    return feature.data[name].data
