# SPDX-License-Identifier: Apache-2.0
"""Cold start: fine-tune a model on a few answers to what it cannot do, then train it with GRPO.

The model is tiny and has random weights; it is asked for the color of a shape in a sentence, as by
`demo.py --text`. With `--real`, it is SmolLM2-135M-Instruct, and it is asked to write a number of four digits
backwards. Supervised fine-tuning on some questions with their answers teaches the model what to try;
reinforcement learning starts from its checkpoint and learns the rest from rewards. The last line of the
output is JSON.

    python3 examples/quickstart/cold_start.py [--real] [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo import DEMOS, accuracies_of, outcome, train
from runs import curve, fine_tune, make_parser, output_folder
from shapes import save_rows

from verl.logger.file import read_log


@dataclass(frozen=True)
class ColdStart:
    """A demo with its two stages.

    Attributes:
        num_taught: Questions that are fine-tuned on.
    """

    demo: str
    num_taught: int
    sft_steps: int
    rl_options: tuple[str, ...]
    sft_options: tuple[str, ...] = ()


TINY = ColdStart(
    "text",
    num_taught=16,
    sft_steps=7,
    rl_options=(
        "data.max_response_length=2",  # a word and the end of the turn
        "worker.actor.optim.lr=3e-4",
        "worker.actor.entropy_coef=0",  # no bonus needed: fine-tuning taught the model what to try
        "trainer.val_freq=10",
        "trainer.max_steps=40",
    ),
)
REAL = ColdStart(
    "reversals",
    num_taught=64,
    sft_steps=16,
    sft_options=("data.max_length=96", "worker.actor.optim.lr=2e-5"),
    rl_options=("trainer.max_steps=30",),
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


def teach(folder: Path, seed: int, plan: ColdStart) -> Path:
    """Run supervised fine-tuning and return the folder of its checkpoints."""
    rows = write_conversations(folder, "train", plan.num_taught), write_conversations(folder, "val", 64)
    return fine_tune(folder, seed, plan.sft_steps, rows, *plan.sft_options)


def reinforce(
    folder: Path, seed: int, plan: ColdStart, output: str, *options: str, overrides: Sequence[str]
) -> Path:
    """Run reinforcement learning and return the folder of its checkpoints."""
    return train(folder, plan.demo, seed, [*plan.rl_options, *options, *overrides], output)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--real", action="store_true", help="train SmolLM2-135M-Instruct")
    arguments, overrides = parser.parse_known_args()
    plan, seed = REAL if arguments.real else TINY, arguments.seed
    folder = output_folder(arguments.folder, "cold_start_real" if arguments.real else "cold_start")

    start = time.time()
    DEMOS[plan.demo].prepare(folder, seed)
    checkpoints = teach(folder, seed, plan)
    losses = curve(read_log(checkpoints), "val/loss")[1]
    taught = f"worker.actor.model.model_path={checkpoints / f'global_step_{plan.sft_steps}'}"
    before = reinforce(folder, seed, plan, "untaught", "trainer.val_only=true", overrides=overrides)
    (untaught,) = accuracies_of(before)
    after = outcome(reinforce(folder, seed, plan, "rl", taught, overrides=overrides), start)

    print(
        f"\nLoss on held-out answers: {losses[0]:.2f} before, {losses[-1]:.2f} after {plan.sft_steps} steps"
    )
    print(
        f"Accuracy on held-out questions: {untaught:.2f} untaught, {after['val_before']:.2f} after"
        f" {plan.num_taught} answers,"
    )
    print(f"{after['val_after']:.2f} after {after['steps']} steps of reinforcement learning")
    summary = {"sft_loss_before": losses[0], "sft_loss_after": losses[-1], "val_untaught": untaught}
    print(json.dumps(summary | after))


if __name__ == "__main__":
    main()
