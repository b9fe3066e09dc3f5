# SPDX-License-Identifier: Apache-2.0
"""Run folders with logs and kept rollouts, without training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from verl.viewer.rollout_store import RolloutStore

WORDS = ["the", " red", " square", " is", " left", " of", " a", " circle", "."]


def write_log(folder: Path, steps: range, offset: float = 0.0) -> None:
    """Write a log of metrics with the reward `offset` + step / 100."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "experiment_log.jsonl").open("a") as file:
        for step in steps:
            values = {"reward/overall": offset + step / 100, "actor/pg_loss": 0.1 / step}
            values |= {"timing_s/gen": 2.0, "timing_s/update_actor": 1.0 + step / 50, "timing_s/step": 3.1}
            file.write(json.dumps({"step": step} | values) + "\n")


def rollout(step: int, group: int, sample: int, **changed: Any) -> dict[str, Any]:
    """Build a row of the store with 6 + `sample` tokens and the score 1 for even samples, else 0."""
    random = np.random.default_rng([step, group, sample])
    tokens = [WORDS[number % len(WORDS)] for number in range(6 + sample)]
    log_probs = -random.exponential(1.0, len(tokens)).astype(np.float32)
    score = float(sample % 2 == 0)
    row = {
        "step": step,
        "group": f"step{step}-0-{group}",
        "sample": sample,
        "data_source": "shapes",
        "score": score,
        "advantage": score - 0.5,
        "prompt_length": 12,
        "response_length": len(tokens),
        "finish_reason": "stop",
        "prompt": f"Where is the square? Question {group} of step {step}.",
        "response": "".join(tokens),
        "ground_truth": "left",
        "reward_values": {"overall": score, "format": 1.0},
        "num_media": 0,
        "media": [],
        "token_ids": list(range(len(tokens))),
        "tokens": tokens,
        "rollout_log_probs": log_probs,
        "old_log_probs": log_probs - 0.01,
        "advantages": np.full(len(tokens), score - 0.5, dtype=np.float32),
    }
    return row | changed


def write_steps(folder: Path, steps: range, groups: int = 2, n: int = 4, **changed: Any) -> None:
    """Write steps of `groups` prompts with `n` responses each."""
    store = RolloutStore(folder)
    for step in steps:
        rows = [rollout(step, group, sample, **changed) for group in range(groups) for sample in range(n)]
        store.write(step, rows)


def with_media(folder: Path) -> dict[str, Any]:
    """Build the media columns of a row with an image and a video of three frames."""
    store = RolloutStore(folder)
    image, *frames = [store.add_image(shapes(left)) for left in (40, 20, 30, 50)]
    media = [
        {"kind": "image", "source": "shapes/7.png", "files": [image], "problem": None},
        {"kind": "video", "source": "films/7.mp4", "files": frames, "problem": None},
    ]
    return {"media": media, "num_media": 2}


def shapes(left: int) -> Image.Image:
    """Draw a red square, `left` pixels from the left, and a blue circle."""
    image = Image.new("RGB", (320, 240), "#e2e8f0")
    draw = ImageDraw.Draw(image)
    draw.rectangle((left, 90, left + 60, 150), fill="#dc2626")
    draw.ellipse((210, 80, 280, 150), fill="#2563eb")
    return image
