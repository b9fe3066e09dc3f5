# SPDX-License-Identifier: Apache-2.0
"""Train a tiny model with random weights to call a tool, with the complete training system.

The questions ask for the color of a dot that the model cannot see unless it calls the tool `zoom`. A random
model never writes JSON, so its tokenizer has tokens that are whole calls: one of the dot and three of other
parts.

Creates the model and the questions, trains with `verl.trainer.main` and plots the curves. The last line of
the output is JSON.

    python3 examples/quickstart/agent_demo.py [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import argparse
import json
import time
from pathlib import Path

from demo import ACCURACY, HERE, KINDS, PANELS, ROOT, curve, draw_curves, train
from dots import CALLS, write_dots
from shapes import COLORS
from transformers import AutoTokenizer

from verl.logger.file import read_log
from verl.models.tiny import save_tiny_model

BASE = "image"  # the demo whose model and options this one shares
CALLED = "val/called_reward"  # share of held-out questions with a call
VIEW = 56 * 56  # pixels of each image as the model sees it
PANELS_WITH_CALLS = PANELS | {"Calls in a conversation of a rollout batch": ("agent/tool_calls", (0, 1))}
del PANELS_WITH_CALLS["Entropy (nats)"]
OPTIONS = (
    "trainer.experiment_name=agent",
    f"data.max_pixels={VIEW}",
    "data.max_response_length=64",
    f"data.override_chat_template={HERE / 'agent.jinja'}",
    "worker.rollout.limit_images=2",
    "worker.rollout.multi_turn.enable=true",
    "worker.rollout.multi_turn.tools=[zoom]",
    "worker.rollout.multi_turn.tool_kwargs={zoom: {units: thousandths, size: 56}}",
    "worker.rollout.multi_turn.max_assistant_turns=2",
    "worker.rollout.multi_turn.max_tokens_per_turn=1",
    "worker.rollout.multi_turn.tool_concurrency=1",
    f"worker.reward.reward_function={HERE / 'agent_reward.py'}:compute_score",
)


def save_model(folder: Path, seed: int) -> Path:
    """Write a random model that has a token for each call, and whose turns end with a call or a color."""
    save_tiny_model(folder, KINDS[BASE].family, seed=seed, added_tokens=CALLS)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [tokenizer.encode(text, add_special_tokens=False) for text in (*CALLS, *COLORS)]
    assert all(len(end) == 1 for end in ends), "each call and each color is one token"
    settings["eos_token_id"] += [end for [end] in ends]
    file.write_text(json.dumps(settings))
    return folder


def prepare(folder: Path, seed: int) -> None:
    """Write the model, 256 training questions and 64 held-out ones."""
    save_model(folder / "model", seed)
    write_dots(folder, "train", 256, 2 * seed + 1)
    write_dots(folder, "val", 64, 2 * seed + 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=None, help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, questions and sampling")
    arguments, overrides = parser.parse_known_args()
    folder = (arguments.folder or ROOT / "outputs" / "quickstart" / "agent").resolve()

    start = time.time()
    prepare(folder, arguments.seed)
    checkpoints = train(folder, BASE, arguments.seed, [*OPTIONS, *overrides])
    log = read_log(checkpoints)
    draw_curves(log, KINDS[BASE].guesses, folder / "curves.png", PANELS_WITH_CALLS)
    (steps, accuracies), (_, rates) = curve(log, ACCURACY), curve(log, CALLED)

    print(
        f"\nAccuracy on held-out questions: {accuracies[0]:.2f} before, {accuracies[-1]:.2f} after"
        f" {steps[-1]} steps"
    )
    print(f"Share of them with a call: {rates[0]:.2f} before, {rates[-1]:.2f} after")
    print(f"Curves: {folder / 'curves.png'}")
    summary = {
        "val_before": accuracies[0],
        "val_after": accuracies[-1],
        "calls_before": rates[0],
        "calls_after": rates[-1],
        "seconds": round(time.time() - start, 1),
        "steps": steps[-1],
        "checkpoint": str(checkpoints / f"global_step_{steps[-1]}"),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
