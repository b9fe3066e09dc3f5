# SPDX-License-Identifier: Apache-2.0
"""Qwen2-Audio: Whisper's encoder, whose frames are pooled in pairs, and a language model that hears only.

Its mel features, a frame for each 10 ms as Whisper's feature extractor makes them, are those of later models.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from verl.distributed.device import to_device
from verl.models.attention.interface import VISION_ATTENTION
from verl.models.families.interface import ExampleRow, MediaFamily, Medium, MediumShape, Sense, example_pixels
from verl.models.families.tiny_sizes import TEXT, TinyModel, tiny_processor

BLANK_FRAMES, EXAMPLE_FRAMES = 4, 30  # of mel features: 1 and 7 tokens
FRAMES_OF_TOKEN = 2  # of an encoder's layers, which are pooled
TINY_EXTRACTOR = ("WhisperFeatureExtractor", {"feature_size": 32, "return_attention_mask": True})
MEL = "input_features"  # (mel frames, mel bins) of a clip
SPEECH_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")


class Qwen2Audio(MediaFamily):
    """Qwen2-Audio (https://arxiv.org/abs/2407.10759), section 2: a token for each 40 ms of at most 30 s.

    transformers and vLLM pad every clip to 30 seconds and mask the padding. Here clips are packed: the
    encoder runs as many frames as they have, and layers that `encoder_layerdrop` would leave out as well.

    Facts of a clip: `frames`, the number of its mel frames, one for each 10 ms; `padded`, that of the longest
    clip. Its tensor has up to two frames more, which the convolutions see.
    """

    kinds = ("audio",)
    tower_attention = VISION_ATTENTION
    takes_features = True
    tiny: ClassVar = {
        "qwen2_audio": TinyModel(
            "qwen2_audio",
            TEXT | {"tie_word_embeddings": False},
            audio=dict(
                num_mel_bins=32, d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=128
            ),
            special_tokens=SPEECH_TOKENS,
            named_tokens={
                "audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>",
                "audio_eos_token": "<|audio_eos|>",
            },
            token_ids={"audio_token_index": "<|AUDIO|>"},
            sound="<|audio_bos|><|AUDIO|><|audio_eos|>",
            processor=partial(tiny_processor, "Qwen2AudioProcessor", feature_extractor=TINY_EXTRACTOR),
        )
    }  # fmt: skip

    @property
    def encoders(self) -> dict[Sense, tuple[str, ...]]:
        return {"audio": ("model.audio_tower", "model.multi_modal_projector")}

    def audio_shape(self, processor: Any, num_samples: int) -> MediumShape:
        frames = num_mel_frames(processor, num_samples)
        facts = {"frames": frames, "padded": processor.feature_extractor.nb_max_frames}
        return MediumShape([self.token_of(processor, "audio")] * audio_tokens(frames), facts)

    def audio_inputs(self, processor: Any, samples: np.ndarray) -> dict[str, Tensor]:
        seen = 2 * encoded_frames(num_mel_frames(processor, len(samples))) + 1
        return {MEL: mel_features(processor, samples, min(seen, processor.feature_extractor.nb_max_frames))}

    def own_inputs(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        padded = [
            nn.functional.pad(medium.tensors[MEL].T, (0, medium.facts["padded"] - len(medium.tensors[MEL])))
            for medium in media
        ]
        mask = torch.zeros(len(media), media[0].facts["padded"], dtype=torch.int64, device=padded[0].device)
        for row, medium in zip(mask, media, strict=True):
            row[: medium.facts["frames"]] = 1
        return {MEL: torch.stack(padded), "feature_attention_mask": mask}

    def encode(self, owner: Any, media: Sequence[Medium]) -> list[Tensor]:
        tower, device = owner.audio_tower, media[0].tensors[MEL].device
        counts = [encoded_frames(medium.facts["frames"]) for medium in media]
        frames = nn.utils.rnn.pad_sequence([medium.tensors[MEL] for medium in media], batch_first=True)
        # The longest clip ends with zeros, as the others do here: see `audio_inputs`.
        hidden = frames.transpose(1, 2).to(tower.conv1.weight.dtype)
        hidden = nn.functional.gelu(tower.conv2(nn.functional.gelu(tower.conv1(hidden)))).transpose(1, 2)
        positions = tower.embed_positions.weight[: max(counts)]
        hidden = hidden[:, : max(counts)] + positions  # (clips, frames, D)
        clips = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        within = torch.cat([torch.arange(count) for count in counts])
        bounds = nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0)).to(torch.int32)  # on CPU
        clips, within = to_device((clips, within), device)
        hidden = hidden[clips, within][None]  # (1, N, D)
        for layer in tower.layers:
            hidden = layer(hidden, None, cu_seq_lens_q=bounds)
        pairs = [part[: count // 2 * 2] for part, count in zip(hidden[0].split(counts), counts, strict=True)]
        pooled = torch.cat(pairs).unflatten(0, (-1, 2)).mean(1)
        features = owner.multi_modal_projector(tower.layer_norm(pooled))
        return list(features.split([count // 2 for count in counts]))

    def units(self, config: Any, facts: Mapping[str, Any]) -> list[int]:
        return [audio_tokens(facts["frames"])]

    def patches_per_token(self, config: Any, sense: Sense) -> int:
        return FRAMES_OF_TOKEN

    def example(self, config: Any, processor: Any, generator: torch.Generator | None = None) -> ExampleRow:
        audio = config.audio_config
        frames = BLANK_FRAMES if generator is None else EXAMPLE_FRAMES
        values = example_pixels((2 * encoded_frames(frames) + 1, audio.num_mel_bins), generator)
        medium = Medium("audio", {MEL: values}, {"frames": frames, "padded": 2 * audio.max_source_positions})
        return ExampleRow(torch.tensor([config.audio_token_id] * audio_tokens(frames)), [medium])


def num_mel_frames(processor: Any, num_samples: int) -> int:
    """Return the number of frames of an audio clip, given its samples at the processor's rate."""
    return -(-num_samples // processor.feature_extractor.hop_length)


def mel_features(processor: Any, samples: np.ndarray, frames: int) -> Tensor:
    """Return the first mel frames (frames, mel bins) of a clip (N,), of which some may be beyond its end."""
    # The processor pads to its longest clip. Zeros as wide as a window give the same frames.
    extractor = processor.feature_extractor
    length = max(len(samples), frames * extractor.hop_length) + extractor.n_fft
    made = extractor(
        [samples], sampling_rate=extractor.sampling_rate, padding="max_length",
        max_length=min(length, extractor.n_samples), truncation=False, return_tensors="pt",
    )  # fmt: skip
    return made[MEL][0, :, :frames].T.contiguous()


def encoded_frames(frames: int) -> int:
    """Return the number of frames in an encoder's layers, after a convolution of stride 2 over mel frames."""
    return (frames + 1) // 2


def audio_tokens(frames: int) -> int:
    """Return the number of tokens of mel frames: a convolution halves it, and so does pooling."""
    return encoded_frames(frames) // FRAMES_OF_TOKEN
