# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM that a family of models needs, by the names in its `engine_patches`."""

import functools
import importlib
import typing
from typing import Any

import torch

from verl.models.families.audio.qwen3_omni import CHUNK_FRAMES, CHUNK_TOKENS
from verl.models.families.interface import Family
from verl.workers.rollout.vllm.omni import (
    positions_where_heard,
    positions_with_sound,
    tokens_with_sound,
    with_whole_chunk,
)
from verl.workers.rollout.vllm.patches import replaceable


def apply_family_patches(family: Family) -> None:
    """Patch vLLM for a family's models, before an engine is built; safe to call again."""
    for patch in family.engine_patches:
        globals()[patch]()
    for schema in family.engine_schemas:
        take_features_of_any_length(schema)


def keep_times_of_frames() -> None:
    """Have vLLM write the times of a GLM-4.6V video's frames in tenths of a second, as its processor does."""
    # vLLM 0.32 rounds them down to seconds, so that the engine would read another prompt than training
    info = replaceable(
        "vllm.model_executor.models.glm4_1v:Glm4vProcessingInfo", "_get_video_second_idx_glm46v"
    )
    info._get_video_second_idx_glm46v = _times_of_frames


def _times_of_frames(self: Any, metadata: dict[str, Any], total_frames: int) -> list[float]:
    """Return the time of the first frame of each temporal patch; frames were sampled before."""
    step = self.get_video_processor().temporal_patch_size
    return [index / metadata["fps"] for index in metadata["frames_indices"][::step]]


def take_several_videos() -> None:
    """Have vLLM take prompts with several videos for GLM-4.xV, of which it allows one."""
    # its code for these models handles any number of them
    info = replaceable("vllm.model_executor.models.glm4_1v:Glm4vProcessingInfo", "get_supported_mm_limits")
    info.get_supported_mm_limits = lambda self: {"image": None, "video": None}


def slice_images_as_the_processor_does() -> None:
    """Have vLLM expand images of MiniCPM-V 4.7 by the largest number of slices that its processor makes."""
    # vLLM 0.32 takes that of the config, or 9, so that the engine would read another prompt than training
    info = replaceable(
        "vllm.model_executor.models.minicpmv4_7:MiniCPMV4_7ProcessingInfo", "get_image_max_slice_num"
    )
    info.get_image_max_slice_num = lambda self: self.get_image_processor().max_slice_nums


def take_times_of_videos() -> None:
    """Have vLLM take the seconds of a temporal patch of Qwen2.5-Omni's videos from the prompt's options."""
    # its processor supposes two frames a second for all videos, whatever was sampled
    processor = replaceable(
        "vllm.model_executor.models.qwen2_5_omni_thinker:Qwen2_5OmniThinkerMultiModalProcessor",
        "_postprocess_hf_mm_data",
    )
    theirs = processor._postprocess_hf_mm_data

    @functools.wraps(theirs)
    def with_times(self: Any, hf_data: Any, hf_kwargs: Any, processed_data: Any) -> Any:
        processed = theirs(self, hf_data, hf_kwargs, processed_data)
        if hf_kwargs.get("second_per_grid_ts"):
            processed["second_per_grid_ts"] = torch.tensor(hf_kwargs["second_per_grid_ts"])
        return processed

    if not hasattr(theirs, "__wrapped__"):
        processor._postprocess_hf_mm_data = with_times


def take_turns_of_videos_and_their_sound() -> None:
    """Have vLLM give Qwen2.5-Omni's videos with sound the tokens and positions that training has."""
    module = "vllm.model_executor.models.qwen2_5_omni_thinker"
    processor = replaceable(
        f"{module}:Qwen2_5OmniThinkerMultiModalProcessor", "omni_get_updates_use_audio_in_video"
    )
    processor.omni_get_updates_use_audio_in_video = classmethod(tokens_with_sound)
    model = replaceable(f"{module}:Qwen2_5OmniThinkerForConditionalGeneration", "get_mrope_input_positions")
    model.get_mrope_input_positions = positions_with_sound


def take_turns_of_qwen3_omni() -> None:
    """Have vLLM give Qwen3-Omni's videos with sound, and its audio, what training has."""
    module = "vllm.model_executor.models.qwen3_omni_moe_thinker"
    processor = replaceable(
        f"{module}:Qwen3OmniMoeThinkerMultiModalProcessor", "get_updates_use_audio_in_video"
    )
    processor.get_updates_use_audio_in_video = tokens_with_sound
    model = replaceable(f"{module}:Qwen3OmniMoeThinkerForConditionalGeneration", "get_mrope_input_positions")
    tower = replaceable(f"{module}:Qwen3OmniMoeAudioEncoder", "forward")
    if not hasattr(tower.forward, "__wrapped__"):
        model.get_mrope_input_positions = positions_where_heard(model.get_mrope_input_positions)
        tower.forward = with_whole_chunk(tower.forward, CHUNK_FRAMES, CHUNK_TOKENS)


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
