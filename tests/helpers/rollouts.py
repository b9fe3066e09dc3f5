# SPDX-License-Identifier: Apache-2.0
"""Run folders with logs and kept rollouts, without training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from verl.viewer.rollout_store import RolloutStore

SPOKEN = ["look", "closer", "zoom", "seen", "part", "how", "far", "left", "no", "tool", "left", "."]
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


def conversation(folder: Path, **changed: Any) -> dict[str, Any]:
    """Build the columns of a conversation of three turns with three calls, of which one failed."""
    store = RolloutStore(folder)
    closer = shapes(40).crop((30, 80, 130, 160)).resize((300, 240))
    picture = {
        "kind": "image",
        "source": "of 9000 bytes",
        "files": [store.add_image(closer)],
        "problem": None,
    }
    turns = [
        _turn(
            0, 3, "I look closer.", [("zoom", {"box": [30, 80, 130, 160]})],
            [_seen("The part, enlarged.", seconds=0.125, media=[picture])], seconds=0.25, reward=0.5,
        ),
        _turn(
            5, 8, "How far left is it, in words?",
            [("python", {"code": "for edge in (40, 100):\n    print(edge / 320)"}), ("zom", {})],
            [_seen("0.125\n0.3125", seconds=1.5), _seen("There is no tool 'zom'", failed=True)], seconds=1.75,
        ),
        _turn(10, 12, "It is **left**.", [], [], seconds=0.0),
    ]  # fmt: skip
    is_trained = [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    tokens = [f" {word}" for word in SPOKEN]
    values = np.linspace(-2.0, 0.0, len(tokens), dtype=np.float32)
    columns = {
        "num_turns": 3, "num_calls": 3, "num_failures": 1, "stop_reason": "stop", "turns": turns,
        "is_trained": is_trained, "is_masked": False, "tokens": tokens,
        "token_ids": list(range(len(tokens))), "response_length": len(tokens),
        "rollout_log_probs": values, "old_log_probs": values, "advantages": values,
        "response": "".join(tokens),
    }  # fmt: skip
    return columns | changed


def _turn(
    start: int,
    stop: int,
    text: str,
    calls: list[tuple[str, Any]],
    observations: list[dict[str, Any]],
    **more: Any,
) -> dict[str, Any]:
    return {
        "start": start, "stop": stop, "text": text, "observations": observations, "is_shown": True,
        "calls": [{"name": name, "arguments": json.dumps(given)} for name, given in calls], "reward": None,
    } | more  # fmt: skip


def _seen(text: str, **more: Any) -> dict[str, Any]:
    media = more.get("media", [])
    row = {"text": text, "failed": False, "seconds": None, "num_media": len(media), "media": media}
    return row | more


def shapes(left: int) -> Image.Image:
    """Draw a red square, `left` pixels from the left, and a blue circle."""
    image = Image.new("RGB", (320, 240), "#e2e8f0")
    draw = ImageDraw.Draw(image)
    draw.rectangle((left, 90, left + 60, 150), fill="#dc2626")
    draw.ellipse((210, 80, 280, 150), fill="#2563eb")
    return image
