# SPDX-License-Identifier: Apache-2.0
"""Read audio with PyAV, as one channel at the rate that a model hears."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import av
import numpy as np

from verl.utils.images import open_container

FORMATS = (
    "wav", "w64", "aiff", "au", "mp3", "flac", "ogg", "aac", "amr", "mov", "matroska", "avi", "mpegts",
    "asf", "flv",
)  # fmt: skip
WAV_FLOAT, WAV_HEADER = 3, "<4sI4s4sIHHIIHH4sI"


@dataclass(frozen=True)
class AudioOptions:
    """Options for reading audio."""

    rate: int  # samples per second
    longest_s: float  # seconds that a model hears at once
    audio_start: float | None = None  # seconds, of the part to read
    audio_end: float | None = None


def has_audio(source: str | bytes) -> bool:
    """Return whether a file has an audio stream, without decoding."""
    with open_container(source, FORMATS) as container:
        return bool(container.streams.audio)


def read_audio(source: str | bytes, options: AudioOptions) -> np.ndarray:
    """Return the samples (N,) float32 of the first audio stream: the mean of its channels.

    Raises:
        ValueError: It has no samples, or more than the model hears.
    """
    first = round((options.audio_start or 0.0) * options.rate)
    stop = None if options.audio_end is None else round(options.audio_end * options.rate)
    longest = int(options.longest_s * options.rate)
    parts: list[np.ndarray] = []
    done = 0  # samples before the next part
    for part in _resampled(source, options.rate):
        parts.append(part[max(0, first - done) : None if stop is None else max(0, stop - done)])
        done += len(part)
        if done - first > longest and (stop is None or stop - first > longest):
            raise ValueError(
                f"it is longer than the {options.longest_s:g} s that the model hears: cut it, or name the"
                " part to read by `audio_start` and `audio_end`"
            )
        if stop is not None and done >= stop:
            break
    samples = np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)
    if not len(samples):
        raise ValueError(f"the audio has no samples{' in this part' if first or stop is not None else ''}")
    return samples


def _resampled(source: str | bytes, rate: int) -> Iterator[np.ndarray]:
    # The channels stay apart: FFmpeg would mix them by their power, models hear their mean.
    resampler = av.AudioResampler(format="fltp", rate=rate)
    with open_container(source, FORMATS) as container:
        if not container.streams.audio:
            raise ValueError("the file has no audio stream")
        # After the last frame, None gives what the filter holds back.
        for frame in chain(container.decode(container.streams.audio[0]), [None]):
            for resampled in resampler.resample(frame):
                yield resampled.to_ndarray().mean(axis=0)  # of (channels, N)


def wav_bytes(samples: np.ndarray, rate: int) -> bytes:
    """Return a WAV file of samples (N,) or (channels, N), unchanged as float32."""
    channels = 1 if samples.ndim == 1 else len(samples)
    data = np.ascontiguousarray(samples.T, dtype="<f4").tobytes()
    frame = 4 * channels
    header = struct.pack(
        WAV_HEADER, b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, WAV_FLOAT, channels, rate, rate * frame,
        frame, 32, b"data", len(data),
    )  # fmt: skip
    return header + data
