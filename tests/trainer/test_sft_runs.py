# SPDX-License-Identifier: Apache-2.0
"""Whole runs of supervised fine-tuning on two CPU processes, and of reinforcement learning from them."""

import json
import re
import subprocess
import sys

import pytest

from scripts.rollouts_to_sft import main as rollouts_to_sft
from tests.faults.runs import saved_tensors
from tests.helpers.fine_tuning import arguments_for, write_conversations
from tests.helpers.training import (
    QUICKSTART,
    ROOT,
    learned,
    quickstart_arguments,
    read_metrics,
    start_training,
    train,
)
from verl.models.tiny import save_tiny_model
from verl.trainer.sft import main

pytestmark = pytest.mark.heavy

PRINTED = "printed.txt"  # in a run's folder


def fine_tune(output, *arguments):
    """Run the command into a folder and return the metrics of each step."""
    finished = start_training(*arguments, f"trainer.save_checkpoint_path={output}", main=main)
    assert finished.returncode == 0, finished.stderr[-6000:]
    (output / PRINTED).write_text(finished.stdout)
    return read_metrics(output)


def make_folder(folder, family):
    save_tiny_model(folder / "model", family)
    for name, count, seed in (("train", 64, 1), ("val", 20, 2)):  # 20 do not divide into batches of 16
        write_conversations(folder, name, count, seed, with_images=family != "qwen2")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("sft"), "qwen2")


@pytest.fixture(scope="module")
def unbroken(folder):
    """Metrics by step of a run that was never stopped."""
    arguments = arguments_for(folder, "trainer.max_steps=8", "trainer.save_freq=4")
    return fine_tune(folder / "unbroken", *arguments, "trainer.logger=[console,file]")


def test_the_loss_of_a_run_falls_in_training_and_on_held_out_rows(unbroken):
    assert sorted(unbroken) == list(range(9))
    losses = [unbroken[step]["train/loss"] for step in range(1, 9)]
    held_out = [unbroken[step]["val/loss"] for step in (0, 4, 8)]

    assert losses[-1] < 0.5 * losses[0]
    assert held_out == sorted(held_out, reverse=True)
    # 16 rows of one word and the end of the turn: 32 tokens are learned in a step
    assert all(unbroken[step]["train/num_tokens"] == 32 for step in range(1, 9))
    assert {"train/grad_norm", "train/lr", "perf/throughput", "sequence_length/mean"} <= set(unbroken[1])


def test_the_console_has_a_line_for_each_phase_and_step_and_for_the_end(folder, unbroken):
    lines = (folder / "unbroken" / PRINTED).read_text().splitlines()
    phases = ["Ray and libraries", "model files", "data", "workers", "models", "first validation"]
    rows = [line.split() for line in lines if re.match(r"\d/8 ", line)]

    assert [found[1] for line in lines if (found := re.fullmatch(r"  (.+?) +\d+\.\d s", line))] == phases
    header = next(line.split() for line in lines if line.startswith("step "))
    assert header == ["step", "loss", "val", "loss", "grad", "lr", "tokens/s", "seconds"]
    assert [row[0] for row in rows] == [f"{step}/8" for step in range(9)]
    assert rows[8][1:3] == [f"{unbroken[8]['train/loss']:.4f}", f"{unbroken[8]['val/loss']:.4f}"]
    best = f"loss {unbroken[8]['val/loss']:.4f} at step 8"
    assert lines[-6].startswith("finished 8 steps in ")
    assert lines[-5] == f"  best validation   {best}"
    export = rf"  export +(\S+/)?verl-merge --local_dir {folder}/unbroken/global_step_8/actor"
    assert re.fullmatch(export, lines[-1])


@pytest.mark.slow
def test_a_run_that_is_resumed_ends_bit_for_bit_as_an_unbroken_one(folder, unbroken):
    arguments = arguments_for(folder, "trainer.max_steps=8", "trainer.save_freq=4")
    output = folder / "resumed"
    checkpoint = folder / "unbroken" / "global_step_4"

    resumed = fine_tune(output, *arguments, f"trainer.load_checkpoint_path={checkpoint}")

    for step in range(5, 9):
        assert learned(resumed[step]) == learned(unbroken[step])
    one, other = (saved_tensors(run / "global_step_8") for run in (folder / "unbroken", output))
    assert one.keys() == other.keys() and len(one) > 20
    assert all(one[key].equal(other[key]) for key in one)


@pytest.mark.slow
def test_a_checkpoint_is_measured_without_training_rows(folder, unbroken):
    checkpoint = folder / "unbroken" / "global_step_4"
    arguments = arguments_for(folder, "data.train_files=", "trainer.val_only=true")

    measured = fine_tune(folder / "measured", *arguments, f"trainer.load_checkpoint_path={checkpoint}")

    assert list(measured) == [4]
    assert measured[4]["val/loss"] == unbroken[4]["val/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_reinforcement_learning_starts_from_the_checkpoint_and_its_rollouts_are_data_again(family, tmp_path):
    folder = make_folder(tmp_path, family)
    lora = ["worker.actor.model.lora.rank=8", "worker.actor.model.lora.alpha=16"]
    chosen = [*lora, "worker.actor.optim.lr=5e-3"] if family == "qwen2" else []
    fine_tune(folder / "sft", *arguments_for(folder, "trainer.max_steps=24", "trainer.val_freq=-1", *chosen))
    options = ["trainer.max_steps=1", "data.max_response_length=2"]

    scratch = train(folder / "scratch", *quickstart_arguments(folder, folder / "model", *options))
    from_it = train(folder / "rl", *quickstart_arguments(folder, folder / "sft" / "global_step_24", *options))

    assert scratch[0]["val/accuracy_reward"] < 0.3 < 0.5 < from_it[0]["val/accuracy_reward"]
    output = tmp_path / "kept.parquet"
    assert rollouts_to_sft([str(folder / "rl"), "--output", str(output), "--min_score", "0.9"]) == 0
    metrics = fine_tune(
        folder / "again",
        *arguments_for(folder, f"data.train_files={output}", "worker.actor.global_batch_size=2"),
        "trainer.max_steps=1",
    )
    assert metrics[1]["train/loss"] > 0


@pytest.mark.slow
def test_the_cold_start_of_the_quickstart_does_what_it_says(tmp_path):
    command = [sys.executable, str(QUICKSTART / "cold_start.py"), "--folder", str(tmp_path)]

    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)

    assert finished.returncode == 0, finished.stderr[-6000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["sft_loss_after"] < 0.2 * found["sft_loss_before"]
    assert found["val_untaught"] < 0.25 < 0.5 < found["val_before"] < found["val_after"]
