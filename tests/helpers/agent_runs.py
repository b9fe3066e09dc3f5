# SPDX-License-Identifier: Apache-2.0
"""Inputs of small runs with the tool `zoom`: the quickstart's questions, and a model that calls and answers.

A random model never writes JSON, so its tokenizer has tokens that are whole calls, which end a turn.
"""

import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.faults.runs import saved_tensors
from tests.helpers.quickstart import COLORS
from tests.helpers.training import ROOT, learned, quickstart_arguments, train
from verl.models.tiny import save_tiny_model

# isort: split
from dots import CALL, call_of, write_dots

__all__ = ["CALLS", "OPTIONS", "save_model", "write_dots"]
# Times, and the last digits of the engine, which depend on the requests that shared a batch.
UNEQUAL = re.compile(r"(rollout|rollout_corr)/|agent/tool(_|/\w+/)s$")
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


def talkative(model):
    """Make about half of the turns of a random model calls or colors."""
    file = model / "model.safetensors"
    tokenizer, weights = AutoTokenizer.from_pretrained(model), load_file(file)
    [name] = [name for name in weights if name.endswith("embed_tokens.weight")]  # the head's too
    rows = [tokenizer.encode(text, add_special_tokens=False)[0] for text in (*CALLS, *COLORS)]
    weights[name][rows] *= 6
    save_file(weights, file, metadata={"format": "pt"})
    return model


def train_two_steps(folder, name, *options):
    """Run the command with the model and the questions of a folder; returns the metrics of both steps."""
    return train(
        folder / name,
        *quickstart_arguments(
            folder,
            folder / "model",
            "data.max_prompt_length=64",
            "worker.rollout.name=hf",
            "trainer.val_before_train=false",
            "trainer.max_steps=2",
            "trainer.save_freq=1",
            "trainer.save_limit=-1",
            *options,
        ),
    )


def check_resumed(folder, name, resumed, unbroken, other="unbroken"):
    """Compare the second step of a resumed run with that of the run `other`: metrics and tensors."""
    assert set(resumed) == {2}
    ours, theirs = (
        {key: value for key, value in learned(metrics[2]).items() if not UNEQUAL.match(key)}
        for metrics in (resumed, unbroken)
    )
    assert ours == theirs
    ours, theirs = (saved_tensors(folder / run / "global_step_2") for run in (other, name))
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(ours[key].equal(theirs[key]) for key in ours)
