# SPDX-License-Identifier: Apache-2.0
"""Programs of `benchmarks/` run in their smallest size; each program has a place here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl.models.tiny import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = {
    "early_stop": "--n 2",
    "log_probs": "--tokens 16 --hidden 16 --vocabulary 64",
}
AT_NIGHT = {
    "agents": "--conversations 2 --seconds 0.1 --tokens 4 --engine hf",
    "algorithms": "--rows 16 --tokens 8 --group 4 --rounds 1",
    "checkpoints": "--million 1 --repeats 1",
    "curriculum": "--seeds 0 --steps 1 --model {model}",
    "data_scale": "--rows 1000",
    "embeddings": "--steps 1",
    "expert_sync": "--layers 1 --experts 8 --hidden 32 --intermediate 32 --rounds 1",
    "families": "--kind qwen2_5_vl --engine hf --steps 1 --accuracy 0",
    "hostile_texts": "--texts 10 --tokens 512 --limit-ms 1e6",
    "hour": "tokens --tokens 1024 --frames 8",
    "long": "--prompt 64 --response 8 --n 2 --rounds 1",
    "memory_plan": "--shapes step",
    "step": "--rounds 1 --prompts 2 --responses 2 --tokens 8 --micro-batch 2 --bare-micro-batch 2",
    "video": "--frames 2 --tokens 4 --rounds 1 --keyframe-seconds 1 --containers mp4",
    "weight_transfer": "--mib 64 --rounds 1",
}
TABLES = {"checkpoints", "memory_plan"}  # for people; others end with JSON
WITH_A_TEST = {"gpu_update", "head_softmax", "learning", "math_answers", "mistakes", "soak"}
# Other trainers, or minutes in any size: run by hand, see benchmarks/README.md.
LARGE = {
    "async_modes", "beside_trl", "lora", "optimizers", "published_steps", "real", "reward_parity",
    "step_choices", "trl_real", "trl_trainer",
}  # fmt: skip


def test_every_program_has_a_place():
    files = (ROOT / "benchmarks").glob("*.py")
    programs = [file.stem for file in files if 'if __name__ == "__main__"' in file.read_text()]

    assert sorted(programs) == sorted([*SMALLEST, *AT_NIGHT, *WITH_A_TEST, *LARGE])


@pytest.mark.parametrize(
    "program",
    [*SMALLEST, *(pytest.param(name, marks=pytest.mark.nightly("benchmarks")) for name in AT_NIGHT)],
)
def test_a_program_ends_with_its_figures(program, tmp_path):
    text = (SMALLEST | AT_NIGHT)[program]
    if "{model}" in text:  # instead of one that is downloaded
        save_tiny_model(tmp_path / "model", "qwen2")
    options = text.format(model=tmp_path / "model").split()
    command = [sys.executable, f"benchmarks/{program}.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-4000:]
    if program in TABLES:
        assert re.search(r"\d", done.stdout)
    else:
        assert json.loads(done.stdout.splitlines()[-1])
