# SPDX-License-Identifier: Apache-2.0
"""A tiny model that calls `zoom`, and its questions: the color of a dot too small to be seen. Deterministic.

The pictures have 448 x 448 pixels and a dot of 2 x 2 in their center. The policy sees them shrunk to 56 x 56,
where the dot changes one pixel by a sixteenth; the tool `zoom` shows it the center. A random model never
writes JSON, so its tokenizer has tokens that are whole calls, which end a turn.
"""

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from transformers import AutoTokenizer

from tests.helpers.quickstart import COLORS, save_rows, vary
from verl.models.tiny import save_tiny_model

IMAGE_SIZE, DOT_SIZE = 448, 2  # pixels
# Boxes in thousandths of the sides, of twice the dot's size.
CENTER = [496, 496, 504, 504]
ELSEWHERE = [[100, 100, 108, 108], [900, 100, 908, 108], [500, 900, 508, 908]]


def draw(rng: random.Random, color: str) -> Image.Image:
    """Draw a dot in the center of a random gray; its color varies a little."""
    gray = rng.randint(0, 255)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (gray, gray, gray))
    start = (IMAGE_SIZE - DOT_SIZE) // 2
    box = (start, start, start + DOT_SIZE - 1, start + DOT_SIZE - 1)
    ImageDraw.Draw(image).rectangle(box, fill=vary(rng, color))
    return image


def call_of(box: list[int]) -> str:
    """Return a call of `zoom` as the policy writes it."""
    call: dict[str, Any] = {"name": "zoom", "arguments": {"box": box}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


CALLS = [call_of(box) for box in (CENTER, *ELSEWHERE)]


def write_dots(folder: Path, name: str, count: int, seed: int) -> Path:
    """Write `count` questions to `<name>.jsonl` and their images to `images/`; returns the file."""
    rng = random.Random(seed)
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        color, path = list(COLORS)[number % len(COLORS)], images / f"{name}_{number:03d}.png"
        draw(rng, color).save(path)
        rows.append({"problem": "<image>What colour?", "answer": color, "images": [path.name]})
    rng.shuffle(rows)
    return save_rows(rows, folder / f"{name}.jsonl")


OPTIONS = (
    f"data.max_pixels={56 * 56}",
    "data.max_response_length=64",
    f"data.override_chat_template={Path(__file__).with_suffix('.jinja')}",
    "worker.rollout.limit_images=2",
    "worker.rollout.multi_turn.enable=true",
    "worker.rollout.multi_turn.tool_kwargs={zoom: {units: thousandths, size: 56}}",
    "worker.rollout.multi_turn.max_assistant_turns=2",
    "worker.rollout.multi_turn.max_tokens_per_turn=1",
)


def save_model(folder: Path, seed: int) -> Path:
    """Write a random model that has a token for each call, and whose turns end with a call or a color."""
    save_tiny_model(folder, "qwen2_5_vl", seed=seed, added_tokens=CALLS)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [tokenizer.encode(text, add_special_tokens=False) for text in (*CALLS, *COLORS)]
    assert all(len(end) == 1 for end in ends), "each call and each color is one token"
    settings["eos_token_id"] += [end for [end] in ends]
    file.write_text(json.dumps(settings))
    return folder
