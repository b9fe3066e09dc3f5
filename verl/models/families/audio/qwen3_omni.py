# SPDX-License-Identifier: Apache-2.0
"""The thinker of Qwen3-Omni: a mixture of experts with the tower of Qwen3-VL and an encoder of audio."""

import math
from collections.abc import Container, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from verl.models.families.audio.qwen2_5_omni import TINY_EARS, Qwen25Omni, tiny_tokens
from verl.models.families.audio.qwen2_audio import MEL, TINY_EXTRACTOR, encoded_frames
from verl.models.families.interface import Kind, Medium
from verl.models.families.qwen_vl import TINY_TOWER_3, time_factor, tiny_parts
from verl.models.families.tiny_sizes import MOE, TEXT, TinyModel, mrope, tiny_processor

CHUNK_FRAMES, CHUNK_TOKENS = 100, 13  # of a second, which the convolutions see on its own


class Qwen3Omni(Qwen25Omni):
    """Qwen3-Omni (https://arxiv.org/abs/2509.17765), sections 2.2 and 2.3.

    Audio has 13 tokens a second, and times of videos count as many positions a second. In a video with sound,
    a temporal patch comes before the audio tokens that are not earlier.

    Positions are whole numbers, as in vLLM; transformers 5.19 keeps fractions of the times of videos.

    The features of a clip do not depend on the clips that are encoded with it, as they do in transformers and
    vLLM: each clip ends with silence, where the processor mirrors the longest one; and the end of each clip
    is padded to a whole chunk of the convolutions, which leak the padding, instead of to the longest chunk.
    """

    wholes: ClassVar = {"qwen3_omni_moe": "thinker_config"}
    unread = ("talker.", "code2wav.")
    unread_files = ()
    engine_patches = (
        "take_times_of_videos", "size_frames_as_the_files_say", "take_turns_of_qwen3_omni",
    )  # fmt: skip
    per_second = 13
    shared_edges = 0
    frames_of_token = 1
    tiny: ClassVar = {
        "qwen3_omni_moe": TinyModel(
            "qwen3_omni_moe",
            TEXT | MOE | mrope([6, 5, 5], mrope_interleaved=True) | {"tie_word_embeddings": False},
            TINY_TOWER_3 | dict(image_size=128, apply_vit_abs_pos_embed=True),  # which vLLM reads
            options={"position_id_per_seconds": per_second},
            audio=TINY_EARS | dict(n_window_infer=200, downsample_hidden_size=16, initializer_range=0.1),
            whole={"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "enable_audio_output": False},
            **tiny_tokens("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>", "token_id"),
            processor=partial(
                tiny_processor, "Qwen3OmniMoeProcessor", **tiny_parts(16), feature_extractor=TINY_EXTRACTOR
            ),
        )
    }

    def audio_tokens(self, frames: int) -> int:
        whole, rest = divmod(frames, CHUNK_FRAMES)
        return CHUNK_TOKENS * whole + encoded_frames(encoded_frames(encoded_frames(rest)))

    def turns(self, patches: int, seconds: float, sounds: int) -> list[list[Any]]:
        """Return the turns of a video's temporal patches, `seconds` apart, and of its audio tokens.

        A patch comes before the audio tokens that are not earlier than it.
        """
        step, heard = time_factor(seconds, self.per_second), 0
        turns: list[list[Any]] = []
        for number in range(patches):
            earlier = min(sounds, math.ceil(number * step)) - heard
            heard += earlier
            turns += [["audio", earlier]] * (earlier > 0)
            if turns and turns[-1][0] == "video":
                turns[-1][1] += 1
            else:
                turns.append(["video", 1])
        return turns + [["audio", sounds - heard]] * (sounds > heard)

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        heard = [medium for medium in media if medium.kind == "audio"]
        # The features of the last one replace no token.
        return super().own_inputs([*media, *map(whole_chunk, heard[:1])])

    def encode_audio(self, tower: Any, audio: Sequence[Medium]) -> list[Tensor]:
        return super().encode_audio(tower, [*audio, whole_chunk(audio[0])])[:-1]

    def encoder_inputs(self, tower: Any, mel: Tensor, lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        module, options = import_module(type(tower).__module__), tower.config
        chunks, sizes = module.chunk_and_pad_features(mel, lengths, options.n_window)
        bounds = module.get_audio_cu_seqlens(sizes, lengths, options.n_window_infer, options.n_window)
        valid = module.get_valid_indices(sizes, options.n_window)
        return bounds, {"padded_feature": chunks, "chunk_lengths": sizes, "valid_indices": valid}

    def unit_frames(self, config: Any) -> int | None:
        return config.audio_config.n_window_infer

    def engine_options(self, kinds: Container[Kind], videos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        options = super().engine_options(kinds, videos)
        return {**options, "audio_kwargs": {"padding": "max_length"}} if "audio" in kinds else options


def whole_chunk(clip: Medium) -> Medium:
    """Return a blank clip of one chunk, to whose length all chunks of a call are padded."""
    mel = clip.tensors[MEL]
    return Medium("audio", {MEL: mel.new_zeros(CHUNK_FRAMES, mel.shape[1])}, {"frames": CHUNK_FRAMES})
