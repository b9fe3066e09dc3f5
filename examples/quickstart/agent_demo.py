# SPDX-License-Identifier: Apache-2.0
"""Train a tiny model with random weights to call a tool, with the complete training system.

The questions ask for the color of a dot that the model cannot see unless it calls the tool `zoom`. A random
model never writes JSON, so its tokenizer has a token that is a whole call. A few steps of supervised
fine-tuning show it both ways to answer: a guess, in two of three conversations, and a call with an answer
after it. From rewards it learns that calls are better, and to read what they show.

Creates the model and the questions, fine-tunes, trains with `verl.trainer.main` and plots the curves. The
last line of the output is JSON.

    python3 examples/quickstart/agent_demo.py [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import json
import random
import time
from pathlib import Path

from demo import ACCURACY, KINDS, PANELS, draw_curves, outcome, train
from dots import BOX, CALL, write_dots
from runs import HERE, ROOT, curve, fine_tune, model_folder, read_arguments
from shapes import COLORS, save_rows
from transformers import AutoTokenizer

from verl.agents.tools.shipped.zoom import Zoom
from verl.logger.file import read_log
from verl.models.tiny import save_tiny_model

CHAT_TEMPLATE = ROOT / "examples" / "chat_template" / "tiny_tools.jinja"
BASE = "image"  # the demo whose model and options this one shares
CALLED = "val/called_reward"  # share of held-out questions with a call
SFT_STEPS, TAUGHT = 120, 960  # conversations
VIEW = 56 * 56  # pixels of each image as the model sees it
PANELS_WITH_CALLS = PANELS | {"Calls in a conversation of a rollout batch": ("agent/tool_calls", (0, 1))}
del PANELS_WITH_CALLS["Entropy (nats)"]
ZOOM = {"units": "thousandths", "size": 56}
OPTIONS = (
    "trainer.experiment_name=agent",
    f"data.max_pixels={VIEW}",
    "data.max_response_length=64",
    "worker.rollout.n=8",
    "worker.actor.micro_batch_size_per_device_for_update=64",
    "worker.actor.micro_batch_size_per_device_for_experience=64",
    "worker.actor.entropy_coef=0.02",
    "worker.actor.optim.lr=5e-4",
    "trainer.max_steps=100",
    f"data.override_chat_template={CHAT_TEMPLATE}",
    "worker.rollout.limit_images=2",
    "worker.rollout.multi_turn.enable=true",
    "worker.rollout.multi_turn.tools=[zoom]",
    f"worker.rollout.multi_turn.tool_kwargs={{zoom: {json.dumps(ZOOM)}}}",
    "worker.rollout.multi_turn.max_assistant_turns=2",
    "worker.rollout.multi_turn.max_tokens_per_turn=1",
    "worker.rollout.multi_turn.tool_concurrency=1",
    f"worker.reward.reward_function={HERE / 'agent_reward.py'}:compute_score",
)


def save_model(folder: Path, seed: int) -> Path:
    """Write a random model that has a token for the call, and whose turns end with a call or a color."""
    save_tiny_model(folder, KINDS[BASE].family, seed=seed, added_tokens=[CALL])
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [tokenizer.encode(text, add_special_tokens=False) for text in (CALL, *COLORS)]
    assert all(len(end) == 1 for end in ends), "the call and each color are one token"
    settings["eos_token_id"] += [end for [end] in ends]
    file.write_text(json.dumps(settings))
    return folder


def write_conversations(folder: Path, name: str, seed: int) -> Path:
    """Write questions, two of three with a guess and one with a call and its answer; returns the file."""
    rng, rows = random.Random(seed), []
    zoom, images = Zoom(**ZOOM), folder / "images"
    for number, line in enumerate((folder / f"{name}.jsonl").read_text().splitlines()):
        question = json.loads(line)
        turns, answer, shown = [], rng.choice(list(COLORS)), list(question["images"])
        if number % 3 == 0:
            seen = zoom([str(images / shown[0])], BOX)
            shown.append(f"{name}_{number:03d}_part.png")
            seen.images[0].save(images / shown[-1])
            answer = question["answer"]
            turns = [("assistant", CALL), ("tool", f"{seen.text}<image>")]
        turns = [("user", question["problem"]), *turns, ("assistant", answer)]
        messages = [{"role": role, "content": text} for role, text in turns]
        rows.append({"messages": messages, "images": shown})
    return save_rows(rows, folder / f"{name}_conversations.jsonl")


def show_calls(folder: Path, seed: int) -> Path:
    """Fine-tune the model on random conversations and return the checkpoint."""
    rows = write_conversations(folder, "taught", seed), write_conversations(folder, "val", seed + 1)
    checkpoints = fine_tune(
        folder, seed, SFT_STEPS, rows,
        f"data.image_dir={folder / 'images'}",
        "data.image_key=images",
        "data.min_pixels=784",
        "data.max_length=128",
        f"data.max_pixels={VIEW}",
        f"data.override_chat_template={CHAT_TEMPLATE}",
        "data.apply_chat_template_kwargs={tools: [{function: {name: zoom}}]}",
        "trainer.val_freq=40",
    )  # fmt: skip
    return checkpoints / f"global_step_{SFT_STEPS}"


def prepare(folder: Path, seed: int) -> None:
    """Write the model, questions to be taught, 256 for training and 64 held-out ones."""
    save_model(model_folder(folder, KINDS[BASE].family), seed)
    write_dots(folder, "train", 256, 2 * seed + 1)
    write_dots(folder, "val", 64, 2 * seed + 2)
    write_dots(folder, "taught", TAUGHT, 2 * seed + 3)


def main() -> None:
    folder, seed, overrides = read_arguments(__doc__, "agent")

    start = time.time()
    prepare(folder, seed)
    model = f"worker.actor.model.model_path={show_calls(folder, seed)}"
    checkpoints = train(folder, BASE, seed, [*OPTIONS, model, *overrides])
    log = read_log(checkpoints)
    draw_curves(log, KINDS[BASE].guesses, folder / "curves.png", PANELS_WITH_CALLS)
    (steps, accuracies), (_, rates) = curve(log, ACCURACY), curve(log, CALLED)

    print(
        f"\nAccuracy on held-out questions: {accuracies[0]:.2f} before, {accuracies[-1]:.2f} after"
        f" {steps[-1]} steps"
    )
    print(f"Share of them with a call: {rates[0]:.2f} before, {rates[-1]:.2f} after")
    print(f"Curves: {folder / 'curves.png'}")
    summary = outcome(checkpoints, start) | {
        "calls_before": rates[0],
        "calls_after": rates[-1],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
