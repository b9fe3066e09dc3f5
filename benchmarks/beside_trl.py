# SPDX-License-Identifier: Apache-2.0
"""Time of a GRPO step compared with TRL's, on this machine, in turns.

    python benchmarks/beside_trl.py --trl .venv-trl/bin/python [--rounds 3] [--trl-processes 2] [a.b=c ...]

Both train the model of `step.py` on the same prompts: as many responses of the same length, KL to a
reference, float32 weights with bf16 compute, AdamW, one update. TRL generates with transformers, since its
vLLM mode needs a GPU. One trainer waits while the other takes a step; figures are medians over the rounds
after a warm-up round. The last line is JSON.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import step

from verl.trainer.metrics import StageTimer

HERE = Path(__file__).resolve().parent


class TRL:
    """TRL's trainer in processes of its own, which wait for `step`."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def step(self) -> float:
        """Run a step and return its seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                return json.loads(line)["seconds"]
        raise RuntimeError(f"TRL ended with status {self.process.wait()} before its step")


@contextlib.contextmanager
def running_trl(folder: Path, options: argparse.Namespace) -> Iterator[TRL]:
    arguments = {
        "steps": options.rounds + 1,
        "prompts": options.prompts,
        "responses": options.responses,
        "tokens": options.tokens,
        "micro-batch": options.trl_micro_batch,
        "processes": options.trl_processes,
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.trl_processes}"]
    command = [
        options.trl,
        *(launcher if options.trl_processes > 1 else []),
        str(HERE / "trl_trainer.py"),
        str(folder),
        *(f"--{name}={value}" for name, value in arguments.items()),
    ]
    threads = max(1, (os.cpu_count() or 1) // options.trl_processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            yield TRL(process)
        except BaseException:
            process.terminate()  # else it waits for its next step
            raise
        process.communicate()  # it prints a summary at its end


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    step.add_sizes(parser)
    parser.add_argument("--trl", required=True, help="an interpreter that has TRL installed")
    parser.add_argument("--trl-processes", type=int, default=2)
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="micro-batch size, per process")
    options, options.overrides = parser.parse_known_args()
    start = time.perf_counter()
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step.make_data(folder, options.prompts)
        with step.running(folder, options) as trainer, running_trl(folder, options) as trl:
            for number in range(options.rounds + 1):
                trainer.run_state.step += 1
                timer = StageTimer()
                with timer("step"):
                    trainer.train_step(timer)
                ours.append(timer.seconds["step"])
                theirs.append(trl.step())
                print(f"round {number}: {ours[-1]:.1f} s, TRL {theirs[-1]:.1f} s", flush=True)
    pairs = list(zip(ours[1:], theirs[1:], strict=True))
    ratio = median(other / one for one, other in pairs)
    print(f"\nstep {median(ours[1:]):.2f} s, TRL's {median(theirs[1:]):.2f} s: {ratio:.2f} times")
    summary = {"step_s": median(ours[1:]), "trl_step_s": median(theirs[1:]), "ratio": ratio}
    summary |= {"ratios": [other / one for one, other in pairs], "seconds": time.perf_counter() - start}
    print(json.dumps(summary, default=float))


if __name__ == "__main__":
    sys.exit(main())
