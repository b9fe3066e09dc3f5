# SPDX-License-Identifier: Apache-2.0
"""Sounds of the quickstart: a tone that is high or low, in some noise. Deterministic."""

import random
import wave
from pathlib import Path

import numpy as np
from shapes import write_rows_with_media

QUESTION = "<audio>Is the tone high or low?"
RATE = 16000  # samples per second
PITCHES = {"high": (1200, 2400), "low": (200, 400)}  # Hz
SECONDS = (0.3, 0.6)
NOISE = 0.05  # of the tone's amplitude


def make_tone(rng: random.Random, answer: str) -> np.ndarray:
    """Return the samples (N,) of a tone, from -1 to 1."""
    times = np.arange(int(rng.uniform(*SECONDS) * RATE)) / RATE
    tone = np.sin(2 * np.pi * rng.uniform(*PITCHES[answer]) * times + rng.uniform(0, 2 * np.pi))
    noise = np.random.default_rng(rng.randrange(1 << 32)).standard_normal(len(times))
    return np.clip(rng.uniform(0.3, 0.8) * (tone + NOISE * noise), -1, 1)


def save_sound(samples: np.ndarray, path: Path) -> None:
    """Write samples (N,) from -1 to 1 as a WAV file of 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def write_tone_questions(folder: Path, name: str, count: int, seed: int) -> Path:
    """Write `count` questions to `<name>.jsonl` and their sounds to `audios/`; returns the file."""
    return write_rows_with_media(
        folder, name, count, seed, question=QUESTION, answers=list(PITCHES), media="audios", suffix=".wav",
        save=lambda rng, answer, path: save_sound(make_tone(rng, answer), path),
    )  # fmt: skip
