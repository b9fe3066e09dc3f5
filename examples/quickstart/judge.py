# SPDX-License-Identifier: Apache-2.0
"""A language model as judge: SmolLM2-135M-Instruct learns to add, and a copy of it says what is right.

A model this small cannot judge by itself, so a copy is first fine-tuned on the prompts of the judge, with
right and wrong answers to the questions. The run then serves it, and its verdicts, yes or no, are the only
rewards; how often the responses are really right is measured, not learned from. The last line of the output
is JSON.

    python3 examples/quickstart/judge.py [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import json
import random
import time
from pathlib import Path

from demo import DEMOS, outcome, train
from judge_reward import question
from runs import HERE, curve, fine_tune, read_arguments
from shapes import save_rows

from verl.logger.file import read_log

NAME = "real"
SFT_STEPS = 32
VERDICTS = 16 * SFT_STEPS  # each is fine-tuned on once
SFT_OPTIONS = ("data.max_length=128", "worker.actor.optim.lr=2e-5", "trainer.val_freq=16")
WORDINGS = ("{}", "{}.", "The answer is {}.", "The sum is {}.", "It is {}.", "= {}", "{} is the answer.")
OPTIONS = (
    f"worker.reward.reward_function={HERE / 'judge_reward.py'}:compute_score",
    "reward_servers.judge.dtype=fp32",
    "reward_servers.judge.max_model_len=256",
    "reward_servers.judge.sampling={max_tokens: 1}",
)


def write_verdicts(folder: Path, name: str, count: int, rng: random.Random) -> Path:
    """Write questions to the judge and what it should say, half of the answers right; returns the file."""
    rows = []
    for line in rng.choices((folder / f"{name}.jsonl").read_text().splitlines(), k=count):
        row = json.loads(line)
        is_right = rng.random() < 0.5
        number = int(row["answer"]) if is_right else wrong_number(int(row["answer"]), rng)
        sum_of = row["problem"].removeprefix("What is ").partition("?")[0]
        answer = rng.choice((*WORDINGS, f"{sum_of} = {{}}")).format(number)
        asked = question(row["problem"], row["answer"], answer)
        verdict = {"role": "assistant", "content": "yes" if is_right else "no"}
        rows.append({"messages": [{"role": "user", "content": asked}, verdict]})
    return save_rows(rows, folder / f"{name}_verdicts.jsonl")


def wrong_number(right: int, rng: random.Random) -> int:
    return rng.choice([number for number in range(1, 31) if number != right])


def teach_judge(folder: Path, seed: int) -> Path:
    """Fine-tune the judge and return the folder of its checkpoints."""
    rng = random.Random(seed)
    rows = write_verdicts(folder, "train", VERDICTS, rng), write_verdicts(folder, "val", 64, rng)
    return fine_tune(folder, seed, SFT_STEPS, rows, *SFT_OPTIONS)


def main() -> None:
    folder, seed, overrides = read_arguments(__doc__, "judge")

    start = time.time()
    DEMOS[NAME].prepare(folder, seed)
    taught = teach_judge(folder, seed)
    losses = curve(read_log(taught), "val/loss")[1]
    judge = f"reward_servers.judge.model_path={taught / f'global_step_{SFT_STEPS}'}"
    found = outcome(checkpoints := train(folder, NAME, seed, [*OPTIONS, judge, *overrides]), start)
    agreed = curve(read_log(checkpoints), "val/agrees_reward")[1]

    print(f"\nThe judge's loss on held-out verdicts: {losses[0]:.2f} before, {losses[-1]:.2f} after")
    print(f"Its verdicts are right for {agreed[0]:.2f} of the responses before, {agreed[-1]:.2f} after")
    print(f"Accuracy on held-out questions: {found['val_before']:.2f} before, {found['val_after']:.2f} after")
    print(json.dumps(found | {"agreed_before": agreed[0], "agreed_after": agreed[-1]}))


if __name__ == "__main__":
    main()
