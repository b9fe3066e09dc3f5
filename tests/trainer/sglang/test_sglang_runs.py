# SPDX-License-Identifier: Apache-2.0
"""Whole runs that sample with SGLang: in turn, a step ahead, as a stream, partially, and after a loss."""

import os
import signal
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from tests.faults.runs import Run
from tests.helpers.training import QUICKSTART, quickstart_arguments, read_metrics, train
from tests.workers.rollout.reference import load_model, needs_engine, reference_log_probs
from verl.checkpoint.merger import merge_checkpoint
from verl.models.tiny import save_tiny_model
from verl.viewer.rollout_store import step_files

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

pytestmark = [pytest.mark.heavy, needs_engine("sglang")]

REWARD = Path(__file__).parents[1] / "scored_by_letters.py"
OWN = ["worker.hybrid_engine=false", "trainer.n_gpus_for_rollout=1"]
STREAM = [*OWN, "trainer.async.mode=stream"]
MODES = {
    "one_step_off": [*OWN, "trainer.async.mode=one_step_off"],
    "stream": STREAM,
    "partial": ["trainer.async.mode=partial"],
}
STEPS = 4
SCHEDULER = "sglang::scheduler"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_tiny_model(folder / "model", "qwen2")
    write_questions(folder, "train", 24, seed=1, with_images=False)
    write_questions(folder, "val", 4, seed=2, with_images=False)
    return quickstart_arguments(
        folder,
        folder / "model",
        "worker.rollout.name=sglang",
        "worker.rollout.val_override_config={temperature: 0.6, top_p: 0.9, n: 2}",
        "worker.actor.optim.lr=1e-2",  # versions differ by more than rounding
        f"worker.reward.reward_function={REWARD}:compute_score",
        "data.max_response_length=40",
        "trainer.rollouts_to_keep=4",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        "trainer.save_limit=-1",
        "trainer.save_freq=1",
        f"trainer.max_steps={STEPS}",
    )


def check_versions(folder, arguments, staleness):
    """Compare every sampled token with the saved weights of the versions that may have sampled it."""
    paths = [merge_checkpoint(folder / f"global_step_{step}" / "actor") for step in range(1, STEPS)]
    [first] = [text.partition("=")[2] for text in arguments if "model.model_path=" in text]
    models = [load_model(path) for path in (first, *paths)]  # by version
    tokenizer = AutoTokenizer.from_pretrained(first)
    for step, file in step_files(folder).items():
        for row in pq.read_table(file).to_pylist():
            prompt = tokenizer.encode(row["prompt"])
            assert len(prompt) == row["prompt_length"]
            found = torch.tensor(row["rollout_log_probs"])
            by_version = torch.stack(
                [reference_log_probs(model, prompt, row["token_ids"]) for model in models[:step]]
            )
            is_of = (by_version - found).abs() < 1e-4  # (versions, tokens)
            oldest = max(0, step - 1 - staleness)
            version = oldest
            for token in range(len(found)):
                while version < step and not is_of[version, token]:
                    version += 1
                assert version < step, f"step {step}: token {token} is of no version from {oldest} on"
    assert set(step_files(folder)) == set(range(1, STEPS + 1))


@pytest.mark.parametrize("mode", MODES)
def test_every_token_of_sglang_is_of_the_saved_weights_of_its_version(mode, arguments, tmp_path):
    metrics = train(tmp_path, *arguments, *MODES[mode])

    assert [*metrics] == [*range(1, STEPS + 1)]
    assert max(values["async/staleness_max"] for values in metrics.values()) <= 1.0
    check_versions(tmp_path, arguments, staleness=1)


def schedulers(run):
    return run.processes(lambda child: SCHEDULER in " ".join(child.cmdline()))


def test_a_stream_whose_sglang_scheduler_is_killed_continues_with_another(arguments, tmp_path):
    run = Run(tmp_path, [*arguments, *STREAM])
    run.wait_for_step(1)

    [pid] = schedulers(run)
    run.harm(lambda: os.kill(pid, signal.SIGKILL))

    assert run.end() == 0, run.stderr
    assert [logged.step for logged in run.steps] == [*range(1, STEPS + 1)]
    assert run.steps[-1].metrics["async/engine_restarts"] == 1.0
    assert "scheduler_0 ended with exit code -9" in run.stderr
    check_versions(tmp_path, arguments, staleness=1)


def test_a_run_in_turn_whose_sglang_scheduler_is_killed_ends_with_the_reason(arguments, tmp_path):
    run = Run(tmp_path, arguments)
    run.come_to(step=2, saved=1)

    [pid] = schedulers(run)
    run.harm(lambda: os.kill(pid, signal.SIGKILL))

    assert run.end() != 0
    assert "scheduler_0 ended with exit code -9" in run.stderr
    assert (tmp_path / "global_step_1").is_dir() and 1 in read_metrics(tmp_path)
