# SPDX-License-Identifier: Apache-2.0
"""Defaults of a run on CPU; given values and runs on GPUs stay as they are."""

import os
from dataclasses import replace

import pytest

from verl.config.ppo import PPOConfig
from verl.config.schema import list_options, load_config
from verl.config.sft import SFTConfig
from verl.distributed.backends import BACKENDS, hiding_variables, shown_backend
from verl.planning.device_defaults import (
    chosen_for_device,
    cpu_defaults,
    device_defaults,
    load_run_config,
)
from verl.trainer.main import main

REQUIRED = [
    "data.train_files=owner/rows", "data.val_files=owner/rows", "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=reward.py:f", "worker.rollout.n=2",
]  # fmt: skip
SFT_REQUIRED = REQUIRED[:3]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text("def f(reward_inputs): return []\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("cuda", "npu"):
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], files=(str(tmp_path / name),)))
    return tmp_path


def test_a_run_on_cpu_computes_in_fp32_without_compiling_in_one_process():
    config = load_run_config(PPOConfig, REQUIRED)
    worker = config.worker

    assert {worker.actor.fsdp.mp_param_dtype, worker.ref.fsdp.mp_param_dtype, worker.rollout.dtype} == {
        "fp32"
    }
    assert worker.rollout.enforce_eager and worker.rollout.tensor_parallel_size == 1
    assert worker.actor.micro_batch_size_per_device_for_update == "auto"
    assert config.trainer.n_gpus_per_node == 1


@pytest.mark.parametrize("cores, loading, measuring", [(1, 1, 1), (2, 1, 2), (6, 5, 6), (64, 8, 16)])
def test_processes_stay_within_the_cores(cores, loading, measuring):
    defaults = cpu_defaults(cores)

    assert defaults["data.num_workers"] == loading
    assert defaults["data.filter_overlong_prompts_workers"] == measuring


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7})

    assert load_run_config(PPOConfig, REQUIRED).data.num_workers == 2


def test_given_values_win_in_files_and_on_the_command_line(folder):
    (folder / "run.yaml").write_text("worker: {rollout: {dtype: bf16, enforce_eager: false}}\n")
    config = load_run_config(PPOConfig, [*REQUIRED, "config=run.yaml", "data.num_workers=8"])

    assert config.worker.rollout.dtype == "bf16" and not config.worker.rollout.enforce_eager
    assert config.data.num_workers == 8
    assert config.worker.actor.fsdp.mp_param_dtype == "fp32"


def test_a_reference_sees_the_value_for_the_device():
    config = load_run_config(
        PPOConfig, [*REQUIRED, "worker.actor.fsdp.mp_reduce_dtype=${worker.rollout.dtype}", "data.seed=7"]
    )

    assert config.worker.actor.fsdp.mp_reduce_dtype == "fp32"


@pytest.mark.parametrize("device", ["cuda", "${oc.env:THE_DEVICE}"])
def test_with_cuda_nothing_changes(device, monkeypatch):
    monkeypatch.setenv("THE_DEVICE", "cuda")
    arguments = [*REQUIRED, f"trainer.device={device}"]

    assert load_run_config(PPOConfig, arguments) == load_config(PPOConfig, arguments)


@pytest.mark.parametrize("visible, found", [(None, True), ("0,1", True), ("", False), ("-1", False)])
def test_with_a_visible_gpu_nothing_changes(folder, monkeypatch, visible, found):
    (folder / "cuda").touch()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert shown_backend() == (BACKENDS["cuda"] if found else None)
    assert (load_run_config(PPOConfig, REQUIRED) == load_config(PPOConfig, REQUIRED)) is found


def test_another_kind_of_gpu_counts_unless_it_is_hidden(folder, monkeypatch):
    (folder / "npu").touch()
    assert shown_backend() == BACKENDS["npu"]

    for name, value in hiding_variables().items():
        monkeypatch.setenv(name, value)
    assert shown_backend() is None


def test_every_default_belongs_to_an_option():
    keys = {entry.key for entry in list_options(PPOConfig)}
    found = device_defaults(PPOConfig, "cpu")

    assert found.keys() <= keys
    assert all(any(f".{key}".endswith(f".{name}") for key in found) for name in cpu_defaults(2))


def test_fine_tuning_has_its_part():
    config = load_run_config(SFTConfig, SFT_REQUIRED)

    assert config.worker.actor.fsdp.mp_param_dtype == "fp32"
    assert config.worker.actor.micro_batch_size_per_device_for_experience == "auto"


def test_what_was_chosen_can_be_listed_without_what_was_given():
    chosen = chosen_for_device(load_run_config(PPOConfig, [*REQUIRED, "worker.rollout.enforce_eager=false"]))

    assert chosen["worker.rollout.dtype"] == "fp32"
    assert "worker.rollout.enforce_eager" not in chosen


def test_a_dry_run_shows_what_was_chosen_for_the_models_of_this_run(capsys):
    assert main([*REQUIRED, "algorithm.disable_kl=true", "--dry-run"]) == 0
    printed = capsys.readouterr().out.split("defaults that follow from the device\n")[1].split("\n\n")[0]

    assert "  worker.rollout.dtype=fp32\n" in printed
    assert "  worker.actor.micro_batch_size_per_device_for_update=auto\n" in printed
    assert "critic" not in printed and "worker.ref" not in printed


def test_a_dry_run_for_gpus_lists_none(capsys):
    assert main([*REQUIRED, "trainer.device=cuda", "--dry-run", "--device-memory-gb=80"]) == 0

    assert "defaults that follow" not in capsys.readouterr().out


def test_tokens_are_corrected_by_default_where_sampling_is_ahead():
    own = [*REQUIRED, "worker.hybrid_engine=false", "trainer.n_gpus_for_rollout=2"]
    ahead = [*own, "trainer.async.mode=one_step_off"]
    correction = "algorithm.rollout_correction"

    def rollout_is(*arguments):
        return load_run_config(PPOConfig, arguments).algorithm.rollout_correction.rollout_is

    assert rollout_is(*ahead) == "token"
    assert rollout_is(*ahead, f"{correction}.rollout_is=sequence") == "sequence"
    assert rollout_is(*ahead, f"{correction}.bypass_mode=true") is None
    assert rollout_is(*own) is None
