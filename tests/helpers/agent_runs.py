# SPDX-License-Identifier: Apache-2.0
"""Inputs of small runs with the tool `zoom`: the quickstart's questions, and a model that calls and answers.

A random model never writes JSON, so its tokenizer has tokens that are whole calls, which end a turn.
"""

import json
from pathlib import Path

from transformers import AutoTokenizer

from tests.helpers.quickstart import COLORS
from tests.helpers.training import ROOT
from verl.models.tiny import save_tiny_model

# isort: split
from dots import CALL, call_of, write_dots

__all__ = ["CALLS", "OPTIONS", "save_model", "write_dots"]
CALLS = [CALL, *map(call_of, ([100, 100, 108, 108], [900, 100, 908, 108], [500, 900, 508, 908]))]

OPTIONS = (
    f"data.max_pixels={56 * 56}",
    "data.max_response_length=64",
    f"data.override_chat_template={ROOT / 'examples/chat_template/tiny_tools.jinja'}",
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
