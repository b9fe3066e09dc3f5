# SPDX-License-Identifier: Apache-2.0
"""Programs of `benchmarks/` run in their smallest size; each program has a place here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = {
    "algorithms": "--rows 16 --tokens 8 --group 4 --rounds 1",
    "data_scale": "--rows 1000",
    "early_stop": "--n 2",
    "log_probs": "--tokens 16 --hidden 16 --vocabulary 64",
    "video": "--frames 2 --tokens 4 --rounds 1 --keyframe-seconds 1 --containers mp4",
}
MINUTES = {"video"}  # it encodes an hour of video
WITH_A_TEST = {"gpu_update", "head_softmax", "learning", "math_answers", "mistakes", "soak"}
# Other trainers, engines or minutes: run by hand, see benchmarks/README.md.
LARGE = {
    "agents", "async_modes", "beside_trl", "checkpoints", "embeddings", "families", "hour", "long", "lora",
    "memory_plan", "optimizers", "published_steps", "reward_parity", "step", "trl_trainer", "weight_transfer",
}  # fmt: skip


def test_every_program_has_a_place():
    files = (ROOT / "benchmarks").glob("*.py")
    programs = [file.stem for file in files if 'if __name__ == "__main__"' in file.read_text()]

    assert sorted(programs) == sorted([*SMALLEST, *WITH_A_TEST, *LARGE])


@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[pytest.mark.nightly("benchmarks")] * (name in MINUTES)) for name in SMALLEST],
)
def test_a_program_ends_with_its_figures_as_json(program):
    command = [sys.executable, f"benchmarks/{program}.py", *SMALLEST[program].split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])
