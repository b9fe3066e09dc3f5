# SPDX-License-Identifier: Apache-2.0
"""Videos with sound of the quickstart: a clap, a flash, both or neither. Deterministic.

Frames alone, or sound alone, are right about half of the questions at most: each tells one event only.
"""

import random
from pathlib import Path

import av
import numpy as np
from shapes import IMAGE_SIZE, write_rows_with_media

QUESTION = "<video>What happens?"
ANSWERS = {"both": (True, True), "clap": (True, False), "flash": (False, True), "neither": (False, False)}
RATE = 16000  # samples per second
FPS, NUM_FRAMES = 8, 8
CLAP = 0.08  # seconds


def draw_frames(rng: random.Random, has_flash: bool) -> list[np.ndarray]:
    """Return dark frames (H, W, 3) uint8; in a flash, two of them are bright."""
    gray, bright = rng.randint(0, 60), rng.randint(200, 255)
    first = rng.randrange(NUM_FRAMES - 1) if has_flash else NUM_FRAMES
    levels = [bright if first <= number <= first + 1 else gray for number in range(NUM_FRAMES)]
    return [np.full((IMAGE_SIZE, IMAGE_SIZE, 3), level, dtype=np.uint8) for level in levels]


def make_sound(rng: random.Random, has_clap: bool) -> np.ndarray:
    """Return the samples (N,) float32 of quiet noise, with a clap if there is one."""
    noise = np.random.default_rng(rng.randrange(1 << 32))
    samples = 0.005 * noise.standard_normal(RATE * NUM_FRAMES // FPS)
    if has_clap:
        size = int(CLAP * RATE)
        start = rng.randrange(len(samples) - size)
        decay = np.exp(-np.arange(size) / (size / 4))
        samples[start : start + size] += rng.uniform(0.4, 0.8) * decay * noise.standard_normal(size)
    return np.clip(samples, -1, 1).astype(np.float32)


def save_film(frames: list[np.ndarray], samples: np.ndarray, path: Path) -> None:
    """Encode frames as MPEG-4 and samples as AAC."""
    with av.open(str(path), "w") as container:
        pictures = container.add_stream("mpeg4", rate=FPS, options={"qscale": "2"})
        pictures.width, pictures.height, pictures.pix_fmt = IMAGE_SIZE, IMAGE_SIZE, "yuv420p"
        sound = container.add_stream("aac", rate=RATE, layout="mono")
        for frame in frames:
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        whole = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        whole.sample_rate = RATE
        resampler = av.AudioResampler("fltp", "mono", RATE, frame_size=1024)
        for part in [*resampler.resample(whole), *resampler.resample(None)]:
            container.mux(sound.encode(part))
        container.mux(pictures.encode())
        container.mux(sound.encode())


def save_event(rng: random.Random, answer: str, path: Path) -> None:
    has_clap, has_flash = ANSWERS[answer]
    save_film(draw_frames(rng, has_flash), make_sound(rng, has_clap), path)


def write_event_questions(folder: Path, name: str, count: int, seed: int) -> Path:
    """Write `count` questions to `<name>.jsonl` and their videos to `videos/`; returns the file."""
    return write_rows_with_media(
        folder, name, count, seed, question=QUESTION, answers=list(ANSWERS), media="videos", suffix=".mp4",
        save=save_event,
    )  # fmt: skip
