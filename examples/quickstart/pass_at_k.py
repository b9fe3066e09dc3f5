# SPDX-License-Identifier: Apache-2.0
"""pass@k of a model before and after training: SmolLM2-135M-Instruct on sums.

Sixteen answers to each held-out question are sampled from the model as it is, and from the model after a
short training. pass@k is the probability that at least one of k answers is right: pass@16 before training
shows how much the model can find by itself, pass@1 after it how much it has learned. The last line of the
output is JSON.

    python3 examples/quickstart/pass_at_k.py [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import json
import time
from pathlib import Path

from demo import DEMOS, outcome, train
from runs import HERE, read_arguments

import verl

NAME = "real"
SAMPLES, KS = 16, (1, 2, 4, 8, 16)
OPTIONS = ("trainer.max_steps=10",)


def pass_rates(model: Path, folder: Path, seed: int) -> dict[int, float]:
    """Sample and score answers of a model; returns pass@k for each k."""
    report = verl.evaluate(
        HERE / DEMOS[NAME].config,
        {
            "data.val_files": folder / "val.jsonl",
            "data.max_response_length": 16,
            "worker.rollout.seed": seed + 1,
            "worker.rollout.val_override_config": {"temperature": 1.0},
            "worker.reward.reward_function": f"{HERE / DEMOS[NAME].reward}:compute_score",
        },
        model=model,
        samples=SAMPLES,
        ks=KS,
        out=folder / "evaluations" / model.name,
    )
    return dict(report.overall.pass_at)


def main() -> None:
    folder, seed, overrides = read_arguments(__doc__, "pass_at_k")

    start = time.time()
    DEMOS[NAME].prepare(folder, seed)
    found = outcome(train(folder, NAME, seed, [*OPTIONS, *overrides]), start)
    rates = {
        model: pass_rates(Path(model), folder, seed) for model in (folder / "model", found["checkpoint"])
    }

    print("\npass@k   before   after")
    before, after = rates.values()
    for k in KS:
        print(f"{k:6}   {before[k]:6.2f}   {after[k]:5.2f}")
    found |= {"val_before": before[1], "val_after": after[1], "pass_before": before, "pass_after": after}
    print(json.dumps(found | {"seconds": round(time.time() - start, 1)}))


if __name__ == "__main__":
    main()
