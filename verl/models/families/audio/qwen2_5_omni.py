# SPDX-License-Identifier: Apache-2.0
"""The thinker of Qwen2.5-Omni: Qwen2.5-VL with a second encoder, for audio.

Only the thinker is trained. Checkpoints on the hub also have a talker and a vocoder, which speak.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from verl.distributed.device import to_device
from verl.models.families.audio.qwen2_audio import (
    BLANK_FRAMES,
    EXAMPLE_FRAMES,
    FRAMES_OF_TOKEN,
    MEL,
    TINY_EXTRACTOR,
    audio_tokens,
    mel_features,
    num_mel_frames,
)
from verl.models.families.interface import ExampleRow, Kind, Medium, MediumShape, Sense, example_pixels
from verl.models.families.mrope import MropeConstants
from verl.models.families.qwen_vl import TINY_TOWER, PatchGridFamily, sampled_fps, time_factor, tiny_parts
from verl.models.families.tiny_sizes import TEXT, TinyModel, mrope, tiny_processor

CHUNK_S = 2  # seconds of a turn of a video's patches and its sound
PATCH_FRAMES = 2  # frames of a temporal patch
TALKER_TOKENS = (
    "tts_text_start_token_id", "tts_text_end_token_id", "tts_text_pad_token_id", "vision_start_token_id",
    "vision_end_token_id", "audio_start_token_id", "audio_end_token_id",
)  # fmt: skip
TINY_EARS = dict(
    num_mel_bins=32, d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128,
    output_dim=128, max_source_positions=200,
)  # fmt: skip


def tiny_tokens(start: str, audio: str, end: str, option: str) -> dict[str, Any]:
    """Return what a recipe says of tokens, given those of audio; options of the config end with `option`."""
    media = {"image": "<|image_pad|>", "video": "<|video_pad|>", "audio": audio}
    edges = {"vision": ("<|vision_start|>", "<|vision_end|>"), "audio": (start, end)}
    ids = {f"{kind}_{option}": token for kind, token in media.items()}
    named = {f"{kind}_token": token for kind, token in media.items()}
    for kind, (first, last) in edges.items():
        ids |= {f"{kind}_start_token_id": first, f"{kind}_end_token_id": last}
        named |= {f"{kind}_bos_token": first, f"{kind}_eos_token": last}
    return dict(
        special_tokens=(audio, start, end), named_tokens=named, token_ids=ids, sound=f"{start}{audio}{end}"
    )


class Qwen25Omni(PatchGridFamily):
    """Qwen2.5-Omni (https://arxiv.org/abs/2503.20215), section 2.2.

    Audio has a token for each 40 ms, and positions like text. Times of videos count 25 positions a second. In
    a video with sound, the patches of each 2 seconds come before the audio tokens of these 2 seconds.

    Facts of an audio clip: `frames`, the number of its mel frames, one for each 10 ms. Of a video with sound
    also `turns`: kind and number of the temporal patches or audio tokens that follow each other.
    """

    wholes: ClassVar = {"qwen2_5_omni": "thinker_config"}
    hub_prefix = "thinker."
    unread = ("talker.", "token2wav.")
    unread_files = ("spk_dict.pt",)
    kinds = ("image", "video", "audio")
    media_owner = ""
    tower = "visual"
    seconds_input = "video_second_per_grid"
    engine_patches = (
        "take_times_of_videos", "size_frames_as_the_files_say", "take_turns_of_videos_and_their_sound",
    )  # fmt: skip
    per_second: ClassVar[int] = 25  # positions in time, and audio tokens
    shared_edges: ClassVar[int] = 1
    frames_of_token: ClassVar[int] = FRAMES_OF_TOKEN  # in the layers of the encoder of audio
    tiny: ClassVar = {
        "qwen2_5_omni": TinyModel(
            "qwen2_5_omni",
            TEXT | mrope([4, 6, 6]) | {"tie_word_embeddings": False},
            TINY_TOWER | dict(window_size=56, fullatt_block_indexes=[1], patch_size=14),
            audio=TINY_EARS,
            whole={
                "architectures": ["Qwen2_5OmniForConditionalGeneration"],
                "enable_audio_output": False,
                "talker_config": dict.fromkeys(TALKER_TOKENS, 0),
            },
            **tiny_tokens("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "token_index"),
            processor=partial(
                tiny_processor, "Qwen2_5OmniProcessor", **tiny_parts(14), feature_extractor=TINY_EXTRACTOR
            ),
        )
    }

    @property
    def encoders(self) -> dict[Sense, tuple[str, ...]]:
        return {**super().encoders, "audio": ("audio_tower",)}

    def audio_tokens(self, frames: int) -> int:
        """Return the tokens of an audio clip, given its mel frames."""
        return audio_tokens(frames)

    def turns(self, patches: int, seconds: float, sounds: int) -> list[list[Any]]:
        """Return the turns of a video's temporal patches, `seconds` apart, and of its audio tokens.

        The patches of each two seconds come before the sound of these two seconds.
        """
        size, step = self.per_second * CHUNK_S, time_factor(seconds, self.per_second)
        chunks = [int(number * step) // size for number in range(patches)]
        turns: list[list[Any]] = []
        for chunk in range(max(chunks[-1] + 1, -(-sounds // size))):
            counts = {"video": chunks.count(chunk), "audio": max(0, min(size, sounds - chunk * size))}
            turns += [[kind, count] for kind, count in counts.items() if count]
        return turns

    def token_of(self, processor: Any, kind: Kind) -> int:
        return processor.tokenizer.convert_tokens_to_ids(getattr(processor, f"{kind}_token"))

    def video_shape(
        self, processor: Any, num_frames: int, height: int, width: int, meta: Mapping[str, Any]
    ) -> MediumShape:
        shape = super().video_shape(processor, num_frames, height, width, meta)
        if "num_samples" not in meta:
            return shape
        seconds, patches = shape.facts["second_per_grid_ts"], shape.facts["grid_thw"][0]
        turns = self.turns(patches, seconds, len(self.audio_shape(processor, meta["num_samples"]).tokens))
        sizes: dict[Kind, int] = {"video": len(shape.tokens) // patches, "audio": 1}
        ids = {kind: self.token_of(processor, kind) for kind in sizes}
        tokens = [ids[kind] for kind, count in turns for _ in range(count * sizes[kind])]
        edges = [processor.audio_bos_token, processor.audio_eos_token]
        start, end = processor.tokenizer.convert_tokens_to_ids(edges)
        return MediumShape([start, *tokens, end], shape.facts | {"turns": turns})

    def audio_shape(self, processor: Any, num_samples: int) -> MediumShape:
        frames = num_mel_frames(processor, num_samples)
        tokens = [self.token_of(processor, "audio")] * self.audio_tokens(frames)
        return MediumShape(tokens, {"frames": frames})

    def constants(self, config: Any) -> MropeConstants:
        found = config.position_id_per_seconds
        assert found == self.per_second, f"a second must have {self.per_second} positions, not {found}"
        return replace(
            super().constants(config), tokens_per_second=self.per_second, shared_edges=self.shared_edges
        )

    def audio_inputs(self, processor: Any, samples: np.ndarray) -> dict[str, Tensor]:
        return {MEL: mel_features(processor, samples, num_mel_frames(processor, len(samples)))}

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        if seen := [medium for medium in media if medium.kind != "audio"]:
            inputs |= super().own_inputs(seen)
        if heard := [medium.tensors[MEL] for medium in media if medium.kind == "audio"]:
            inputs[MEL] = nn.utils.rnn.pad_sequence(heard, batch_first=True).transpose(1, 2)
            masks = [torch.ones(len(clip), dtype=torch.int64, device=clip.device) for clip in heard]
            inputs["feature_attention_mask"] = nn.utils.rnn.pad_sequence(masks, batch_first=True)
        return inputs

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        seen = [medium for medium in media if medium.kind != "audio"]
        heard = [medium for medium in media if medium.kind == "audio"]
        blank: list[Medium] = []
        if not (seen and heard):
            device = next(iter(media[0].tensors.values())).device
            blank = to_device(self.example(owner.config, None).media, device)
        pictures = super().encode(owner, seen or blank[:1])
        sounds = self.encode_audio(owner.audio_tower, heard or blank[1:])
        # Of a model that has deepstack levels, those of audio are zero: all features are equally wide.
        beside = pictures[0].shape[-1] - sounds[0].shape[-1]
        remaining = iter(pictures), (nn.functional.pad(sound, (0, beside)) for sound in sounds)
        found = [next(remaining[medium.kind == "audio"]) for medium in media]
        if blank:  # the other encoder's gradients are zero, not missing
            found[0] = found[0] + 0 * (pictures if heard else sounds)[0].sum()
        return found

    def encode_audio(self, tower: Any, audio: Sequence[Medium]) -> list[Tensor]:
        """Return the features (tokens, hidden size) of each clip, from one call of the encoder."""
        frames = torch.cat([medium.tensors[MEL] for medium in audio])
        lengths = torch.tensor([medium.facts["frames"] for medium in audio])
        # Computed on CPU, so that no length is read back from the device.
        bounds, on_cpu = self.encoder_inputs(tower, frames.T, lengths)
        inputs = to_device(on_cpu, frames.device)
        encoded = tower(frames.T, feature_lens=lengths, cu_seqlens=bounds, **inputs).last_hidden_state
        return list(encoded.split([self.audio_tokens(length) for length in lengths.tolist()]))

    def encoder_inputs(self, tower: Any, mel: Tensor, lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute what the encoder derives from the lengths (clips,) of joined mel features (bins, frames).

        Returns:
            The bounds of the frames that attend to each other, and inputs for the device.
        """
        module = import_module(type(tower).__module__)
        chunks, sizes = module.chunk_and_pad_features(mel, lengths, tower.config.n_window)
        return module.get_audio_cu_seqlens(sizes), {
            "padded_feature": chunks,
            "chunk_lengths": sizes,
            "valid_indices": module.get_valid_indices(sizes),
            "pool_indices": module.get_pool_indices(lengths),
        }

    def unit_frames(self, config: Any) -> int | None:
        """Return the mel frames that are encoded on their own; None if a clip cannot be cut."""
        size = 2 * config.audio_config.n_window
        return None if size % 4 else size  # else features are made of two chunks

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        if "frames" not in facts:
            return super().units(config, facts)
        frames = facts["frames"]
        size = self.unit_frames(config) or frames
        starts = range(0, frames, size)
        tokens = [self.audio_tokens(min(size, frames - start)) for start in starts]
        return [count for count in tokens if count]

    def cut(self, config: Any, medium: Medium, first: int, stop: int) -> Medium:
        if medium.kind != "audio":
            return super().cut(config, medium, first, stop)
        size = self.unit_frames(config) or medium.facts["frames"]
        is_last = stop == len(self.units(config, medium.facts))
        frames = medium.tensors[MEL][first * size : None if is_last else stop * size]
        return medium._replace(tensors={MEL: frames}, facts={"frames": len(frames)})

    def patches_per_token(self, config: Any, sense: Sense) -> int:
        return self.frames_of_token if sense == "audio" else super().patches_per_token(config, sense)

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        image = super().example(config, processor, generator)
        frames = BLANK_FRAMES if generator is None else EXAMPLE_FRAMES
        values = example_pixels((frames, config.audio_config.num_mel_bins), generator)
        audio = Medium("audio", {MEL: values}, {"frames": frames})
        tokens = [config.audio_token_id] * self.audio_tokens(frames)
        ids = torch.tensor([config.audio_start_token_id, *tokens, config.audio_end_token_id])
        return ExampleRow(torch.cat([image.input_ids, ids]), [*image.media, audio])

    def engine_options(self, kinds: Container[Kind], videos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        options = super().engine_options(kinds, videos)
        if videos:
            options["second_per_grid_ts"] = [PATCH_FRAMES / sampled_fps(meta) for meta in videos]
        return options
