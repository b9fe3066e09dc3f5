# SPDX-License-Identifier: Apache-2.0
"""Cold start: fine-tune a tiny model with random weights on a few answers, then train it with GRPO.

The questions are the same as in `demo.py --text`: the color of a shape in a sentence. Supervised fine-tuning
on some questions with their answers lifts the model above chance; reinforcement learning starts from its
checkpoint and learns the rest from rewards. The last line of the output is JSON.

    python3 examples/quickstart/cold_start.py [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import json
import time
from pathlib import Path

from demo import KINDS, accuracies_of, train
from runs import curve, fine_tune, read_arguments
from shapes import save_rows

from verl.logger.file import read_log

NAME = "text"
NUM_TAUGHT = 16  # questions that are fine-tuned on
SFT_STEPS, RL_STEPS = 7, 40
RL_OPTIONS = (
    "data.max_response_length=2",  # a word and the end of the turn
    "worker.actor.optim.lr=3e-4",
    "worker.actor.entropy_coef=0",  # no bonus needed: fine-tuning taught the model what to try
    "trainer.val_freq=10",
    f"trainer.max_steps={RL_STEPS}",
)


def write_conversations(folder: Path, name: str, count: int) -> Path:
    """Write the first questions of a file and their answers as chat messages; returns the new file."""
    rows = []
    for line in (folder / f"{name}.jsonl").read_text().splitlines()[:count]:
        question = json.loads(line)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": question["problem"]},
                    {"role": "assistant", "content": question["answer"]},
                ]
            }
        )
    return save_rows(rows, folder / f"{name}_conversations.jsonl")


def teach(folder: Path, seed: int) -> Path:
    """Run supervised fine-tuning and return the folder of its checkpoints."""
    rows = write_conversations(folder, "train", NUM_TAUGHT), write_conversations(folder, "val", 64)
    return fine_tune(folder, seed, SFT_STEPS, rows)


def reinforce(folder: Path, seed: int, output: str, *overrides: str) -> list[float]:
    """Run reinforcement learning and return the accuracies on held-out questions, the first before it."""
    return accuracies_of(train(folder, NAME, seed, [*RL_OPTIONS, *overrides], output))


def main() -> None:
    folder, seed, overrides = read_arguments(__doc__, "cold_start")

    start = time.time()
    KINDS[NAME].prepare(folder, seed)
    checkpoints = teach(folder, seed)
    losses = curve(read_log(checkpoints), "val/loss")[1]
    checkpoint = checkpoints / f"global_step_{SFT_STEPS}"
    (untaught,) = reinforce(folder, seed, "untaught", "trainer.val_only=true", *overrides)
    first, *_, last = reinforce(folder, seed, "rl", f"worker.actor.model.model_path={checkpoint}", *overrides)

    print(f"\nLoss on held-out answers: {losses[0]:.2f} before, {losses[-1]:.2f} after {SFT_STEPS} steps")
    print(f"Accuracy on held-out questions: {untaught:.2f} untaught, {first:.2f} after {NUM_TAUGHT} answers,")
    print(f"{last:.2f} after {RL_STEPS} steps of reinforcement learning")
    summary = {
        "sft_loss_before": losses[0],
        "sft_loss_after": losses[-1],
        "val_untaught": untaught,
        "val_before": first,
        "val_after": last,
        "seconds": round(time.time() - start, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
