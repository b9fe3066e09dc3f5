# SPDX-License-Identifier: Apache-2.0
"""Mel features of audio, as Whisper's feature extractor makes them: a frame for each 10 ms."""

from typing import Any

import numpy as np
from torch import Tensor

BLANK_FRAMES, EXAMPLE_FRAMES = 4, 30  # of mel features: 1 and 7 tokens
FRAMES_OF_TOKEN = 2  # of an encoder's layers, which are pooled
TINY_EXTRACTOR = ("WhisperFeatureExtractor", {"feature_size": 32, "return_attention_mask": True})
MEL = "input_features"  # (mel frames, mel bins) of a clip


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
